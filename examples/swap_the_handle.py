"""Swap the handle in CuPy code: change one import, and its convolutions are micro-batched. Needs an NVIDIA GPU.

    python3 -m venv .venv && .venv/bin/pip install --quiet '.[cuda13]' && .venv/bin/python examples/swap_the_handle.py

With CUDA 12, take the extra cuda12. Everything but convolutions still goes to cuDNN itself.
"""

from typing import Any

from ucudnn import UcudnnError, cudnn  # was: from cupy.cuda import cudnn


def convolve(limit_bytes: int) -> Any:
    """Convolve as `cupyx.cudnn` does, within a limit; return the output."""
    import cupy

    generator = cupy.random.RandomState(0)
    x = generator.standard_normal((256, 64, 27, 27), dtype=cupy.float32)
    weight = generator.standard_normal((192, 64, 5, 5), dtype=cupy.float32)
    y = cupy.empty((256, 192, 27, 27), dtype=cupy.float32)
    cudnn.set_max_workspace_size(limit_bytes)
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    for _ in range(3):  # the first call measures and plans; the last one is timed
        begin.record()
        cudnn.convolution_forward(x, weight, None, y, (2, 2), (1, 1), (1, 1), 1, auto_tune=True, tensor_core="auto")
        end.record()
    end.synchronize()
    print(f"{limit_bytes >> 20:4} MiB  {cupy.cuda.get_elapsed_time(begin, end):8.2f} ms")
    return y


def main() -> None:
    """Run the same convolution within two limits, and compare the outputs."""
    try:
        cudnn.destroy(cudnn.create())
    except UcudnnError as error:
        raise SystemExit(f"this example needs an NVIDIA GPU: {error}") from error
    print(" limit      time")
    small, large = convolve(16 << 20), convolve(1 << 30)
    print(f"the outputs differ by {float(abs(small - large).max() / abs(large).max()):.0e}")


if __name__ == "__main__":
    main()
