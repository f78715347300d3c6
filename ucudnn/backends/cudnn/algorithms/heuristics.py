"""Listing: what cuDNN's heuristics offer for a problem, and at which sizes they are asked."""

import logging
from collections.abc import Sequence

from ucudnn.backends.cudnn.algorithms.operation_graph import OperationGraph
from ucudnn.backends.cudnn.api.library import Library
from ucudnn.errors import CudnnError
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.profiles.measurement import Algorithm

_LOG = logging.getLogger(__name__)
_ANCHOR_STEP = 4
_MOST_ANCHORS = 4


def listing_graph(library: Library, handle: int, problem: ConvolutionProblem) -> OperationGraph:
    """Return the graph of a problem as it is listed and measured: BackwardFilter as it accumulates.

    Raises:
        CudnnError: if cuDNN cannot describe the problem.
    """
    return OperationGraph(library, handle, problem, alpha=1.0, beta=listing_beta(problem))


def graph_algorithms(library: Library, handle: int, problem: ConvolutionProblem) -> list[Algorithm]:
    """Return the engine configurations that compute a problem as its math mode and determinism allow."""
    try:
        return listing_graph(library, handle, problem).algorithms()
    except CudnnError as error:
        _LOG.debug("the graph API has nothing for %s: %s", problem, error)
        return []


def listing_beta(problem: ConvolutionProblem) -> float:
    """Return the beta with which algorithms of a problem are listed and measured: 1 where micro-batches accumulate."""
    return 1.0 if problem.operation is Operation.BACKWARD_FILTER else 0.0


def anchors(sizes: Sequence[int]) -> list[int]:
    """Return the sizes at which heuristics are asked: the largest, and from there a few, each at most a quarter."""
    found: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not found or size * _ANCHOR_STEP <= found[-1]:
            found.append(size)
    return found[:_MOST_ANCHORS]
