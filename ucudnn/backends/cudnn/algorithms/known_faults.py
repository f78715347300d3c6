"""Faults of cuDNN that were seen, so that cuDNN is never asked to run into them.

Both faults concern padding that differs before and after x, as it does for slabs at the ends of a volume. They were
seen with cuDNN 9.19 on an H200, where they do not depend on types, strides or mini-batch sizes.
"""

from ucudnn.backends.cudnn.api.enums import HeuristicMode
from ucudnn.problem import ConvolutionProblem, Operation

_ONE_PADDING = "eng50"
"""Computes gradients of the input as if x were padded after its end as before its begin; with knobs it does not."""


def ends_process(mode: HeuristicMode, problem: ConvolutionProblem) -> bool:
    """Return whether asking a heuristic about a problem ends the process (SIGSEGV).

    For a gradient of the filters, mode B takes the padding before x for the padding after it too, and fails if x is
    then smaller than the filter.
    """
    return (
        mode is HeuristicMode.B
        and problem.operation is Operation.BACKWARD_FILTER
        and any(
            size + 2 * before < (taps - 1) * dilation + 1
            for size, before, taps, dilation in zip(
                problem.spatial, problem.padding, problem.kernel, problem.dilation, strict=True
            )
        )
    )


def computes_wrong(name: str, problem: ConvolutionProblem) -> bool:
    """Return whether an engine configuration computes something else than the problem, or writes only a part of it."""
    return name == _ONE_PADDING and problem.operation is Operation.BACKWARD_DATA and bool(problem.post_padding)
