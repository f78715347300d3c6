"""What a float32 sum takes: its bytes, and a model of the time in which it is rounded.

The time is modelled and not measured, so that all ranks and all processes predict the same.
"""

from math import ceil, prod

from ucudnn.configuration import Float32Sum
from ucudnn.problem import ConvolutionProblem, DataType

_GPU_UNIT = 256
_GPU_CALL_MS = 0.005
_GPU_BYTES_PER_MS = 10**9  # less than the bandwidth of any GPU with tensor cores for bfloat16


def float32_sum_of(problem: ConvolutionProblem, unit: int, call_ms: float, bytes_per_ms: float) -> Float32Sum:
    """Return the float32 sum of a filter gradient of 16 bits."""
    elements = prod(problem.w_shape)
    moved = elements * (DataType.FLOAT32.itemsize + 2 * problem.dtype.itemsize)  # beta may read the output, too
    return Float32Sum(
        size_bytes=ceil(elements * DataType.FLOAT32.itemsize / unit) * unit,
        time_ms=call_ms + moved / bytes_per_ms,
    )


def float32_sum_on_gpu(problem: ConvolutionProblem) -> Float32Sum:
    """Return the float32 sum of a filter gradient of 16 bits on a GPU."""
    return float32_sum_of(problem, _GPU_UNIT, _GPU_CALL_MS, _GPU_BYTES_PER_MS)
