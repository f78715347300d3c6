"""One engine configuration ready to run: execution plans for its alpha and beta, variant packs for its pointers."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import final

from ucudnn.backends.base import PreparedCall
from ucudnn.backends.cudnn.algorithms.addresses import Places
from ucudnn.backends.cudnn.algorithms.operation_graph import OperationGraph, W, X, Y, round_up
from ucudnn.backends.cudnn.api.descriptor import Descriptor
from ucudnn.backends.cudnn.api.enums import Attribute, Kind, Type
from ucudnn.backends.cudnn.api.library import Library
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer
from ucudnn.errors import UnsupportedProblemError
from ucudnn.problem import ConvolutionProblem
from ucudnn.slabs import Rows

_MOST_PACKS = 4096  # pointers that recur are few; what never recurs must not pile up
_MOST_SCALINGS = 64

_Place = tuple[int, int, int, int, float, float, int, Rows | None]
"""x, w, y, first sample, alpha, beta, workspace, and the first rows of a slab: what a variant pack depends on."""


@final
class GraphCall(PreparedCall):
    """An engine configuration for one problem.

    alpha and beta are part of an execution plan, so each pair has a plan of its own, built when it is first used
    unless it is among `scalings`. Variant packs are kept: one with known pointers is executed as it is.

    Args:
        library: cuDNN.
        handle: address of the cudnnHandle_t.
        problem: what is computed, at micro-batch size.
        algorithm: name of the engine configuration.
        scalings: pairs of alpha and beta whose plans are built at once.
        graphs: gives the operation graph of a problem with an alpha and a beta.

    Raises:
        UnsupportedProblemError: if there is no such engine configuration.
        CudnnError: if cuDNN cannot build a plan.
    """

    def __init__(
        self,
        library: Library,
        handle: int,
        problem: ConvolutionProblem,
        algorithm: str,
        scalings: Iterable[tuple[float, float]],
        graphs: Callable[[ConvolutionProblem, float, float], OperationGraph],
    ) -> None:
        self._library = library
        self._handle = handle
        self._graphs = graphs
        self._problem = problem
        self._algorithm = algorithm
        self._execute = library.function("cudnnBackendExecute")
        self._places = Places(problem)
        self._plans: dict[tuple[float, float], _ExecutionPlan] = {}
        self._packs: dict[_Place, tuple[_ExecutionPlan, Descriptor]] = {}
        for alpha, beta in scalings:
            self._plan(alpha, beta)

    def adopt(self, alpha: float, beta: float, plan: Descriptor, owner: object) -> None:
        """Take a plan that was built elsewhere.

        Args:
            alpha: factor of the convolution.
            beta: factor of what the output holds.
            plan: of the same algorithm, with these factors.
            owner: what must live as long.
        """
        self._plans[alpha, beta] = _ExecutionPlan(plan, owner)
        self._packs.clear()  # they hold plans, too

    @property
    def workspace_bytes(self) -> int:
        """What the plans built so far need, rounded up as algorithms state it."""
        return max((round_up(plan.workspace_bytes) for plan in self._plans.values()), default=0)

    def launch(
        self,
        x: int,
        w: int,
        y: int,
        *,
        start: int,
        alpha: float,
        beta: float,
        workspace: DeviceBuffer,
        first_rows: Rows | None = None,
    ) -> None:
        """Queue the convolution of samples [start, start + batch), on the stream of the cuDNN handle.

        Raises:
            CudnnError: if cuDNN cannot run it.
            UnsupportedProblemError: if the workspace is too small.
        """
        place = x, w, y, start, alpha, beta, workspace.address, first_rows
        self._run(*(self._packs.get(place) or self._bound(place, workspace)))

    def bind(
        self,
        x: int,
        w: int,
        y: int,
        *,
        start: int,
        alpha: float,
        beta: float,
        workspace: DeviceBuffer,
        first_rows: Rows | None = None,
    ) -> Callable[[], None]:
        """Return a launch whose plan and variant pack are there.

        Raises:
            CudnnError: if cuDNN cannot build the plan.
            UnsupportedProblemError: if the workspace is too small.
        """
        place = x, w, y, start, alpha, beta, workspace.address, first_rows
        return partial(self._run, *(self._packs.get(place) or self._bound(place, workspace)))

    def _run(self, plan: "_ExecutionPlan", pack: Descriptor) -> None:
        status = self._execute(self._handle, plan.address, pack.address)
        if status:
            raise self._library.error(status, f"cudnnBackendExecute of {self._algorithm} for {self._problem}")

    def _bound(self, place: "_Place", workspace: DeviceBuffer) -> tuple["_ExecutionPlan", Descriptor]:
        """Make the variant pack of a place, and keep it."""
        x, w, y, start, alpha, beta, address, first_rows = place
        plan = self._plans.get((alpha, beta)) or self._plan(alpha, beta)
        if workspace.size_bytes < plan.workspace_bytes:
            raise UnsupportedProblemError(
                f"{self._algorithm} needs {plan.workspace_bytes} bytes of workspace with alpha {alpha} and beta"
                f" {beta}, but has {workspace.size_bytes}: {self._problem}"
            )
        x, y = self._places.of(x, y, start, first_rows)
        if len(self._packs) >= _MOST_PACKS:
            self._packs.clear()
        self._packs[place] = found = plan, self._pack(x, w, y, address)
        return found

    def _plan(self, alpha: float, beta: float) -> "_ExecutionPlan":
        plan = _ExecutionPlan(self._graphs(self._problem, alpha, beta).plan(self._algorithm))
        if len(self._plans) >= _MOST_SCALINGS:
            self._plans.clear()
            self._packs.clear()
        self._plans[alpha, beta] = plan
        return plan

    def _pack(self, x: int, w: int, y: int, workspace: int) -> Descriptor:
        return (
            Descriptor(self._library, Kind.VARIANT_PACK)
            .set(Attribute.VARIANT_PACK_UNIQUE_IDS, Type.INT64, (X, W, Y))
            .set(Attribute.VARIANT_PACK_DATA_POINTERS, Type.VOID_PTR, (x, w, y))
            .set(Attribute.VARIANT_PACK_WORKSPACE, Type.VOID_PTR, workspace)
            .finalize()
        )


@final
class _ExecutionPlan:
    """An execution plan with what launching needs of it at hand."""

    __slots__ = ("_descriptor", "_owner", "address", "workspace_bytes")

    def __init__(self, descriptor: Descriptor, owner: object = None) -> None:
        self._descriptor = descriptor
        self._owner = owner
        self.address = descriptor.address
        self.workspace_bytes = descriptor.number(Attribute.EXECUTION_PLAN_WORKSPACE_SIZE, Type.INT64)
