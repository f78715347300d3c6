"""What cuDNN gets wrong, by what was seen of it: none of it is asked for.

Both faults concern padding that differs before and after x, which slabs at a volume's ends have: seen with cuDNN 9.19
on an H200, where they do not depend on types, strides or mini-batch sizes.
"""

from ucudnn.backends.cudnn.api.enums import HeuristicMode
from ucudnn.problem import ConvolutionProblem, Operation

_ONE_PADDING = "eng50"
"""Computes gradients of the input as if the padding after x were that before it; those with knobs do not."""


def ends_process(mode: HeuristicMode, problem: ConvolutionProblem) -> bool:
    """Whether asking the heuristics about a problem ends the process (SIGSEGV).

    Mode B, asked for a gradient of the filters, takes the padding before x for that after it, too, and fails where x
    would then be smaller than the filter.
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
    """Whether an engine configuration computes something else than a problem, or writes a part of it only."""
    return name == _ONE_PADDING and problem.operation is Operation.BACKWARD_DATA and bool(problem.post_padding)
