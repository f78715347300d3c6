"""One engine configuration that is ready to run: execution plans for alpha and beta, and variant packs for pointers."""

from array import array
from collections.abc import Callable, Iterable
from functools import partial
from typing import final
from weakref import WeakValueDictionary

from ucudnn.arrays import BiasedFilters
from ucudnn.backends.base import BEGIN, OVERWRITE, Offset, PreparedCall, Scaling
from ucudnn.backends.cudnn.algorithms.operation_graph import BIAS, OperationGraph, W, X, Y, round_up
from ucudnn.backends.cudnn.algorithms.wrapped_call import Filters, PartAddresses
from ucudnn.backends.cudnn.api.descriptor import BackendDescriptor, variant_pack
from ucudnn.backends.cudnn.api.enums import Attribute, Type
from ucudnn.backends.cudnn.api.library import Library
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer
from ucudnn.backends.cudnn.gpu.driver import relaxed
from ucudnn.bounded import BoundedDict
from ucudnn.errors import UnsupportedProblemError
from ucudnn.problem import ConvolutionProblem
from ucudnn.slabs import Rows

_MOST_PACKS = 4096  # the pointers that recur are few
_MOST_SCALINGS = 64
_TENSORS, _WITH_BIAS = array("q", (X, W, Y)), array("q", (X, W, Y, BIAS))

BuiltCalls = WeakValueDictionary[tuple[ConvolutionProblem, str], "GraphCall"]
"""Calls whose plans are built, by problem and algorithm, as long as somebody keeps them."""

_Addresses = tuple[int, Filters, int, int]
"""Of x, w and y, and of the workspace."""

_PackKey = tuple[int, Filters, int, int, int, Rows | None, float, float]
"""The same, and the items of offset and scaling. Python's collector does not visit a tuple of numbers."""


@final
class GraphCall(PreparedCall):
    """An engine configuration for one problem, whose lender is another call of it with plans to take.

    alpha and beta are part of an execution plan, so each pair has its own plan. It is built at its first use, or at
    once if the pair is among `scalings`. Variant packs are kept, so that a call with known pointers only executes one.

    A plan that was built on another cudnnHandle_t runs on this call's handle and its stream, which cuDNN does not
    promise: with cuDNN 9.19 on an H200, 260 plans of all operations computed the same there. Where cuDNN refuses one,
    that launch fails, and later ones run plans of this call's own.
    """

    def __init__(
        self,
        library: Library,
        handle: int,
        problem: ConvolutionProblem,
        algorithm: str,
        scalings: Iterable[Scaling],
        graphs: Callable[[ConvolutionProblem, Scaling], OperationGraph],
        lender: "GraphCall | None" = None,
    ) -> None:
        self._library = library
        self._lender = lender
        self._handle = handle
        self._graphs = graphs
        self._problem = problem
        self._algorithm = algorithm
        self._execute = library.function("cudnnBackendExecute")
        self._addresses = PartAddresses(problem)
        self._plans: BoundedDict[Scaling, _ExecutionPlan] = BoundedDict(_MOST_SCALINGS)
        self._packs: BoundedDict[_PackKey, BackendDescriptor] = BoundedDict(_MOST_PACKS)
        for scaling in scalings:
            self._build(scaling)

    def adopt(self, scaling: Scaling, plan: BackendDescriptor, owner: object) -> None:
        """Take a plan that was built elsewhere, and keep what must live as long."""
        self._keep(scaling, _ExecutionPlan(plan, owner))

    @property
    def workspace_bytes(self) -> int:
        """Workspace that the plans built so far need, rounded up as algorithms state it."""
        return max((round_up(plan.workspace_bytes) for plan in self._plans.values()), default=0)

    def launch(
        self, x: int, w: Filters, y: int, workspace: DeviceBuffer, offset: Offset = BEGIN, scaling: Scaling = OVERWRITE
    ) -> None:
        self._run(*self._pack((x, w, y, workspace.address), workspace.size_bytes, offset, scaling))

    def bind(
        self, x: int, w: Filters, y: int, workspace: DeviceBuffer, offset: Offset = BEGIN, scaling: Scaling = OVERWRITE
    ) -> Callable[[], None]:
        return partial(self._run, *self._pack((x, w, y, workspace.address), workspace.size_bytes, offset, scaling))

    def executable(self, offset: Offset, scaling: Scaling, workspace_bytes: int) -> tuple[int, int, int, object]:
        """Return the address of an execution plan, the offsets of a part in x and y, and what keeps the plan."""
        plan = self._plan_within(scaling, workspace_bytes)
        return plan.address, *self._addresses.at(0, 0, offset), plan

    def kernels(self, scaling: Scaling) -> object:
        return self._plans.get(scaling)

    def _run(self, plan: "_ExecutionPlan", pack: BackendDescriptor) -> None:
        status = self._execute(self._handle, plan.address, pack.address)
        if status:
            if self._lender is not None:
                self._lender = None
                self._plans.clear()
                self._packs.clear()
            raise self._library.error(status, f"cudnnBackendExecute of {self._algorithm} for {self._problem}")

    def _pack(
        self, addresses: _Addresses, size_bytes: int, offset: Offset, scaling: Scaling
    ) -> tuple["_ExecutionPlan", BackendDescriptor]:
        key = *addresses, *offset, *scaling
        known = self._packs.get(key)
        if known is not None:
            return self._plans[scaling], known
        plan = self._plan_within(scaling, size_bytes)
        x, w, y, workspace = addresses
        x, y = self._addresses.at(x, y, offset)
        if isinstance(w, BiasedFilters):
            pack = variant_pack(self._library, _WITH_BIAS, (x, w.w, y, w.bias), workspace)
        else:
            pack = variant_pack(self._library, _TENSORS, (x, w, y), workspace)
        self._packs[key] = pack
        return plan, pack

    def _plan_within(self, scaling: Scaling, workspace_bytes: int) -> "_ExecutionPlan":
        """Return the plan of an alpha and a beta, which has some bytes of workspace."""
        plan = self._plans.get(scaling)
        if plan is None:
            with relaxed():  # a program may capture the first call with these factors
                plan = self._build(scaling)
        if workspace_bytes < plan.workspace_bytes:
            raise UnsupportedProblemError(
                f"{self._algorithm} needs {plan.workspace_bytes} bytes of workspace with alpha {scaling.alpha} and beta"
                f" {scaling.beta}, but has {workspace_bytes}: {self._problem}"
            )
        return plan

    def _build(self, scaling: Scaling) -> "_ExecutionPlan":
        lent = None if self._lender is None else self._lender._plans.get(scaling)
        if lent is not None:
            return self._keep(scaling, lent)
        return self._keep(scaling, _ExecutionPlan(self._graphs(self._problem, scaling).plan(self._algorithm)))

    def _keep(self, scaling: Scaling, plan: "_ExecutionPlan") -> "_ExecutionPlan":
        self._plans[scaling] = plan
        self._packs.clear()  # they would hold a plan that was dropped or replaced
        return plan


@final
class _ExecutionPlan:
    __slots__ = ("_descriptor", "_owner", "address", "workspace_bytes")

    def __init__(self, descriptor: BackendDescriptor, owner: object = None) -> None:
        self._descriptor = descriptor
        self._owner = owner
        self.address = descriptor.address
        self.workspace_bytes = descriptor.number(Attribute.EXECUTION_PLAN_WORKSPACE_SIZE, Type.INT64)
