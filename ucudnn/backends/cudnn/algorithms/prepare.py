"""Prepares cuDNN's algorithms, so that they run on the tensors as they are or on copies of them."""

from collections.abc import Iterable
from dataclasses import replace
from typing import final
from weakref import WeakValueDictionary

from ucudnn.backends.base import OVERWRITE, Scaling
from ucudnn.backends.cudnn.algorithms.compile_ahead import AheadCompiler
from ucudnn.backends.cudnn.algorithms.gathered import GatheredCall, asked_of_cudnn, is_gathered
from ucudnn.backends.cudnn.algorithms.graph_call import BuiltCalls, GraphCall
from ucudnn.backends.cudnn.algorithms.heuristics import listing_scaling
from ucudnn.backends.cudnn.algorithms.known_faults import computes_wrong
from ucudnn.backends.cudnn.algorithms.legacy_call import ADDED, AddedBiasCall, LegacyCall
from ucudnn.backends.cudnn.algorithms.operation_graph import OperationGraph, is_engine
from ucudnn.backends.cudnn.algorithms.packed import PackedCall, base_of, dense
from ucudnn.backends.cudnn.algorithms.summed import SummedCall, asked_for_sum, is_summed
from ucudnn.backends.cudnn.api.graph_parts import GraphParts
from ucudnn.backends.cudnn.api.library import Library
from ucudnn.backends.cudnn.gpu.base import Gpu
from ucudnn.bounded import BoundedDict
from ucudnn.errors import UnsupportedProblemError
from ucudnn.problem import ConvolutionProblem
from ucudnn.profiles.measurement import Algorithm

CudnnCall = AddedBiasCall | GatheredCall | GraphCall | LegacyCall | PackedCall | SummedCall
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

    def prepare(self, problem: ConvolutionProblem, algorithm: str, scalings: Iterable[Scaling]) -> CudnnCall:
        """Make an algorithm ready, with plans for some pairs of alpha and beta."""
        if problem.biased and algorithm.endswith(ADDED):
            return self._added(problem, self.prepare(problem.without_bias(), algorithm.removesuffix(ADDED), scalings))
        base = base_of(algorithm)
        if base is not None:
            call = self.prepare(dense(problem), base, scalings)
            return PackedCall(problem, call, call.workspace_bytes, self.device.copy_runs)
        if is_summed(algorithm):
            return self._summed(problem, algorithm, self.prepare(*asked_for_sum(problem, algorithm), (OVERWRITE,)))
        if is_gathered(algorithm):
            call = self.prepare(*asked_of_cudnn(problem, algorithm), scalings)
            return GatheredCall(problem, call, call.workspace_bytes, self.device)
        if is_engine(algorithm):
            if computes_wrong(algorithm, problem):  # a stored measurement may name it
                raise UnsupportedProblemError(f"{algorithm} does not compute {problem}")
            return self._graph_call(problem, algorithm, scalings)
        if problem.biased:
            raise UnsupportedProblemError(f"{algorithm} adds no bias: {problem}")
        return LegacyCall(self.library, self.handle, problem, algorithm)

    def prepare_for_bench(self, problem: ConvolutionProblem, algorithm: Algorithm) -> CudnnCall:
        """Make an algorithm ready for its measurement.

        An engine that was compiled in the background runs on the cudnnHandle_t on which it was compiled.
        """
        if problem.biased and algorithm.name.endswith(ADDED):
            inner = replace(algorithm, name=algorithm.name.removesuffix(ADDED))
            return self._added(problem, self.prepare_for_bench(problem.without_bias(), inner))
        asked, name = _asked(problem, algorithm.name)
        scaling = listing_scaling(asked)
        built = self.compiler.built(asked, name) if algorithm.compiles else None
        if built is None:
            return self.prepare(problem, algorithm.name, (scaling,))
        library, own = self.library, built.handle.address
        library.check(library.function("cudnnSetStream")(own, self.device.stream()), "cudnnSetStream")

        def graph(problem: ConvolutionProblem, scaling: Scaling) -> OperationGraph:
            return OperationGraph(library, own, problem, scaling)

        call = GraphCall(library, own, asked, name, (), graph)
        call.adopt(scaling, built.descriptor, built)
        if is_summed(algorithm.name):
            return self._summed(problem, algorithm.name, call)
        return call if asked is problem else GatheredCall(problem, call, call.workspace_bytes, self.device)

    def _graph_call(self, problem: ConvolutionProblem, algorithm: str, scalings: Iterable[Scaling]) -> GraphCall:
        lender = self.built.get((problem, algorithm))
        call = GraphCall(self.library, self.handle, problem, algorithm, scalings, self.graph, lender)
        if lender is None:
            self.built[problem, algorithm] = call
        return call

    def _added(self, problem: ConvolutionProblem, call: CudnnCall) -> AddedBiasCall:
        return AddedBiasCall(self.library, self.handle, problem, call, call.workspace_bytes)

    def _summed(self, problem: ConvolutionProblem, algorithm: str, call: CudnnCall) -> SummedCall:
        return SummedCall(problem, algorithm, call, call.workspace_bytes, self.device)

    def announce(self, problem: ConvolutionProblem, algorithm: str) -> None:
        """Begin to compile an engine that may be measured soon."""
        self.compiler.build(*_asked(problem, algorithm))


def _asked(problem: ConvolutionProblem, name: str) -> tuple[ConvolutionProblem, str]:
    """Return the problem that cuDNN computes for an algorithm that is compiled, and cuDNN's name of the algorithm."""
    if problem.biased and name.endswith(ADDED):
        problem, name = problem.without_bias(), name.removesuffix(ADDED)
    return asked_for_sum(problem, name) if is_summed(name) else asked_of_cudnn(problem, name)
