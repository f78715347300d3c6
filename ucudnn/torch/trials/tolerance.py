"""How far the outputs of two algorithms may be from each other."""

from ucudnn.problem import ConvolutionProblem, DataType, MathMode

TOLERANCES = {
    DataType.FLOAT16: 1e-2,
    DataType.BFLOAT16: 3e-2,
    DataType.FLOAT32: 1e-2,
    DataType.FLOAT64: 1e-9,
}
"""The largest relative L2 distance between two algorithms on a program's own data, which may cancel in sums."""

FMA_TOLERANCE = 1e-3
"""The same for float32 without TF32."""


def tolerance(problem: ConvolutionProblem) -> float:
    """Return the largest relative distance between the outputs of two algorithms that compute a problem."""
    fma = problem.dtype is DataType.FLOAT32 and problem.math is MathMode.FMA
    return FMA_TOLERANCE if fma else TOLERANCES[problem.dtype]
