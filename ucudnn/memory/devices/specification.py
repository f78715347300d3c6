"""A device profile from the figures of a specification, with shares of them that other devices reach.

The shares are those of the GPUs that ship with ucudnn and have published times of training. Their convolutions in
TF32, channels first, reach 21 to 26 operations for each byte per second of bandwidth, those with a large cache 43.
"""

from typing import Any

from ucudnn.errors import InvalidValueError

_BANDWIDTH = 0.75  # share that kernels reach
_PRODUCTS, _TENSOR_PRODUCTS = 0.8, 0.7  # shares of their peaks that matrix products reach without and with tensor cores
_CONVOLUTIONS, _TENSOR_CONVOLUTIONS = 0.55, 0.6  # the same of convolutions, whose tensor cores wait for the memory
_FLOPS_PER_BYTE = 24
_LAST, _LAST_16 = 1.5, 1.6  # how many times as much channels last reaches, in TF32 and in 16 bits
_FLOAT64 = 1 / 64  # of float32, as GPUs have it that are not made for it
_OF_16_BITS = 0.8  # share of what TF32 reaches of its peak that 16 bits reach of theirs


def specified_device(
    name: str,
    *,
    memory_bytes: int,
    tflops: float,
    tensor_tflops: float | None = None,
    tf32_tflops: float | None = None,
    bandwidth: float,
    link: float,
) -> dict[str, Any]:
    """Return the content of a profile's file.

    Args:
        name: its name.
        memory_bytes: its memory.
        tflops: peak of float32, in 10^12 operations per second.
        tensor_tflops: peak of tensor cores for 16 bits with sums in float32, without sparsity; None without them.
        tf32_tflops: their peak for TF32; half of that for 16 bits by default.
        bandwidth: of its memory, in 10^9 bytes per second.
        link: what a copy from or to pinned memory reaches, in the same unit.

    Raises:
        InvalidValueError: if a figure is not above 0.
    """
    figures = {"flops": tflops, "tensor-flops": tensor_tflops, "tf32-flops": tf32_tflops, "bandwidth": bandwidth}
    for what, figure in {**figures, "link": link, "memory": memory_bytes}.items():
        if figure is not None and not figure > 0:
            raise InvalidValueError(f"{what} {figure} is not above 0")
    matrix = {"float32": _PRODUCTS}
    convolution = {"float32": {"first": _CONVOLUTIONS, "last": _CONVOLUTIONS}}
    if tensor_tflops is not None:
        tf32 = tensor_tflops / 2 if tf32_tflops is None else tf32_tflops
        reached = min(_TENSOR_CONVOLUTIONS, _FLOPS_PER_BYTE * bandwidth / 1e3 / tf32)
        for kind, peak, share, last in (
            ("tf32", tf32, reached, _LAST),
            ("float16", tensor_tflops, _OF_16_BITS * reached, _LAST_16),
            ("bfloat16", tensor_tflops, _OF_16_BITS * reached, _LAST_16),
        ):
            matrix[kind] = round(_TENSOR_PRODUCTS * peak / tflops, 3)
            convolution[kind] = {
                which: round(share * times * peak / tflops, 3) for which, times in (("first", 1), ("last", last))
            }
    else:
        convolution["tf32"] = convolution["float16"] = convolution["bfloat16"] = convolution["float32"]
    matrix["float64"] = round(_PRODUCTS * _FLOAT64, 4)
    convolution["float64"] = dict.fromkeys(("first", "last"), round(_CONVOLUTIONS * _FLOAT64, 4))
    return {
        "format": "ucudnn-device",
        "version": 1,
        "name": name,
        "memory_bytes": memory_bytes,
        "link": {"to_host": link * 1e9, "from_host": link * 1e9, "duplex": 0.9, "contention": 1.1},
        "flops_per_second": tflops * 1e12,
        "bytes_per_second": _BANDWIDTH * bandwidth * 1e9,
        "launch_ms": 0.004,
        "matrix": matrix,
        "convolution": convolution,
    }
