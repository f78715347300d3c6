"""What cuDNN's heuristics offer for a problem, and the sizes at which they are asked."""

import logging
from collections.abc import Sequence

from ucudnn.backends.base import ACCUMULATE, OVERWRITE, Scaling
from ucudnn.backends.cudnn.algorithms.operation_graph import OperationGraph
from ucudnn.backends.cudnn.api.library import Library
from ucudnn.errors import CudnnError
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.profiles.measurement import Algorithm

_LOG = logging.getLogger(__name__)
_ANCHOR_STEP = 4
_MOST_ANCHORS = 4


def listing_graph(library: Library, handle: int, problem: ConvolutionProblem) -> OperationGraph:
    """Return the graph of a problem with the scaling with which it is listed and measured."""
    return OperationGraph(library, handle, problem, listing_scaling(problem))


def graph_algorithms(library: Library, handle: int, problem: ConvolutionProblem) -> list[Algorithm]:
    """Return the engine configurations that compute a problem within its math mode and determinism."""
    try:
        return listing_graph(library, handle, problem).algorithms()
    except CudnnError as error:
        _LOG.debug("the graph API has nothing for %s: %s", problem, error)
        return []


def listing_scaling(problem: ConvolutionProblem) -> Scaling:
    """Return the scaling with which cuDNN's algorithms are listed: micro-batches of BackwardFilter accumulate.

    Mixed 16-bit/float32 engines are listed with beta = 0, because those that are compiled cannot accumulate.
    """
    return OVERWRITE if problem.float32_sum else measured_scaling(problem)


def measured_scaling(problem: ConvolutionProblem) -> Scaling:
    """Return the scaling with which algorithms are measured: micro-batches of BackwardFilter accumulate."""
    return ACCUMULATE if problem.operation is Operation.BACKWARD_FILTER else OVERWRITE


def anchors(sizes: Sequence[int]) -> list[int]:
    """Return the sizes at which heuristics are asked: the largest and a few more, at most a quarter each."""
    found: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not found or size * _ANCHOR_STEP <= found[-1]:
            found.append(size)
    return found[:_MOST_ANCHORS]
