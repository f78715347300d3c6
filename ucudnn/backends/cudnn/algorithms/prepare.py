"""Prepares cuDNN's algorithms, so that they run on the tensors as they are or on copies of them."""

from collections.abc import Iterable
from functools import partial
from typing import final
from weakref import WeakValueDictionary

from ucudnn.backends.base import OVERWRITE, Scaling
from ucudnn.backends.candidates import GATHERED
from ucudnn.backends.cudnn.algorithms.compile_ahead import AheadCompiler, BuiltPlan
from ucudnn.backends.cudnn.algorithms.gathered import GATHERING, GatheredCall
from ucudnn.backends.cudnn.algorithms.graph_call import BuiltCalls, GraphCall
from ucudnn.backends.cudnn.algorithms.heuristics import listing_scaling
from ucudnn.backends.cudnn.algorithms.legacy_call import ADDED, ADDING, AddedBiasCall, LegacyCall
from ucudnn.backends.cudnn.algorithms.operation_graph import OperationGraph, computes_wrong, is_engine
from ucudnn.backends.cudnn.algorithms.packed import PACKING, PackedCall
from ucudnn.backends.cudnn.algorithms.summed import SUMMING, SummedCall
from ucudnn.backends.cudnn.algorithms.wrapped_call import WrappedCall, Wrapping
from ucudnn.backends.cudnn.api.descriptor import GraphParts
from ucudnn.backends.cudnn.api.library import Library
from ucudnn.backends.cudnn.gpu.base import Gpu
from ucudnn.bounded import BoundedDict
from ucudnn.errors import UnsupportedProblemError
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.measurement import Algorithm

CudnnCall = GraphCall | LegacyCall | WrappedCall
"""A prepared call of cuDNN."""

_MOST_GRAPHS = 16  # enough for the sizes that are being measured


@final
class Preparer:
    """Makes algorithms ready, on one cudnnHandle_t.

    Attributes:
        built: calls that are ready, and may be those of another handle of the same GPU: their plans are taken.
    """

    def __init__(
        self, library: Library, handle: int, device: Gpu, compiler: AheadCompiler, owner: object = None
    ) -> None:
        self.built: BuiltCalls = WeakValueDictionary()
        self._owner = owner  # of the handle, because plans that are lent may outlive their backend
        self.library = library
        self.handle = handle
        self.device = device
        self.compiler = compiler
        self._graphs: BoundedDict[tuple[ConvolutionProblem, Scaling], OperationGraph] = BoundedDict(_MOST_GRAPHS)
        self._parts = GraphParts(library)

    def graph(self, problem: ConvolutionProblem, scaling: Scaling) -> OperationGraph:
        """Return the operation graph of a problem; the latest graphs are kept."""
        key = problem, scaling
        graph = self._graphs.get(key)
        if graph is None:
            graph = OperationGraph(self.library, self.handle, problem, scaling, self._parts)
            self._graphs[key] = graph
        return graph

    def prepare(
        self, problem: ConvolutionProblem, algorithm: str, scalings: Iterable[Scaling], *, ahead: bool = False
    ) -> CudnnCall:
        """Make an algorithm ready, with plans for some pairs of alpha and beta.

        Args:
            problem: the problem at micro-batch size.
            algorithm: name of the algorithm.
            scalings: the pairs.
            ahead: whether a background thread may have compiled its engine. Such an engine has a plan for the scaling
                of its listing. It runs on the cudnnHandle_t that compiled it.
        """
        wrapping = wrapping_of(algorithm)
        if wrapping is not None:
            if not wrapping.applies(problem):
                raise UnsupportedProblemError(f"{algorithm} does not compute {problem}")
            if wrapping.end in SUMMING:  # a kernel of our own adds to the sum
                scalings = (OVERWRITE,)
            call = self.prepare(*wrapping.asked(problem, algorithm), scalings, ahead=ahead)
            return self._wrapped(problem, wrapping.end, call)
        if not is_engine(algorithm):
            if problem.biased:
                raise UnsupportedProblemError(f"{algorithm} adds no bias: {problem}")
            return LegacyCall(self.library, self.handle, problem, algorithm)
        if computes_wrong(algorithm, problem):  # a stored measurement may name it
            raise UnsupportedProblemError(f"{algorithm} does not compute {problem}")
        built = self.compiler.built(problem, algorithm) if ahead else None
        if built is not None:
            return self._adopted(problem, algorithm, built)
        lender = self.built.get((problem, algorithm))
        graph_call = GraphCall(self.library, self.handle, problem, algorithm, scalings, self.graph, lender)
        if lender is None:
            self.built[problem, algorithm] = graph_call
        return graph_call

    def prepare_for_bench(self, problem: ConvolutionProblem, algorithm: Algorithm) -> CudnnCall:
        """Make an algorithm ready for its measurement."""
        return self.prepare(problem, algorithm.name, (listing_scaling(problem),), ahead=algorithm.compiles)

    def announce(self, problem: ConvolutionProblem, algorithm: str) -> None:
        """Begin to compile an engine that may be measured soon."""
        while wrapping := wrapping_of(algorithm):
            problem, algorithm = wrapping.asked(problem, algorithm)
        self.compiler.build(problem, algorithm)

    def _adopted(self, problem: ConvolutionProblem, algorithm: str, built: BuiltPlan) -> GraphCall:
        library, own = self.library, built.handle.address
        library.check(library.function("cudnnSetStream")(own, self.device.stream()), "cudnnSetStream")
        graph = partial(OperationGraph, library, own)
        call = GraphCall(library, own, problem, algorithm, (), graph)
        call.adopt(listing_scaling(problem), built.descriptor, built)
        return call

    def _wrapped(self, problem: ConvolutionProblem, end: str, call: CudnnCall) -> WrappedCall:
        if end == ADDED:
            return AddedBiasCall(self.library, self.handle, problem, call, call.workspace_bytes)
        if end == PACKING.end:
            return PackedCall(problem, call, call.workspace_bytes, self.device.copy_runs)
        if end == GATHERED:
            return GatheredCall(problem, call, call.workspace_bytes, self.device)
        return SummedCall(problem, end, call, call.workspace_bytes, self.device)


_WRAPPINGS = {each.end: each for each in (ADDING, PACKING, GATHERING, *SUMMING.values())}


def wrapping_of(name: str) -> Wrapping | None:
    """Return how our own work is around an algorithm, given by its name; None for cuDNN's own algorithms."""
    return _WRAPPINGS.get("+" + name.rpartition("+")[2])
