"""Sketches of outputs: a thousandth of the memory tells how far apart two outputs are."""

from functools import cache

import numpy as np
import torch

from ucudnn.torch.calls.output_form import OutputForm
from ucudnn.torch.device.timed_device import relative

_SUMMED, _AT_ONCE = 1 << 10, 1 << 21  # elements of one sum, and elements that are multiplied at a time


@cache
def _signs() -> torch.Tensor:
    """Return the signs; not at the import, because NumPy's random numbers take 15 ms to load."""
    return torch.from_numpy(np.random.default_rng(0).choice([-1.0, 1.0], _SUMMED))


def sketch(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sums of a tensor's blocks of 1024 elements with random signs.

    The squared length of the difference of two sketches is on average that of the difference of the tensors, because
    the signs are independent (Alon, Matias and Szegedy, 1996). For a million elements it is so within 10 %.

    Args:
        tensor: a tensor without gaps. Tensors are compared in the order of their memory.
    """
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    flat = tensor.as_strided((tensor.numel(),), (1,))
    signs = _signs().to(tensor.device, tensor.dtype, non_blocking=True)
    whole = len(flat) // _SUMMED * _SUMMED
    parts = flat[:whole].split(_AT_ONCE) if whole else ()
    sums = [torch.sum(part.view(-1, _SUMMED) * signs, 1, dtype=wide) for part in parts]
    rest = flat[whole:]
    return torch.cat([*sums, torch.sum(rest * signs[: len(rest)], 0, keepdim=True, dtype=wide)])


def distance_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the distance of two tensors on the host, relative to the length of the second one."""
    return relative(float(torch.dist(found.double(), expected.double())), float(expected.double().norm()))


def sketch_sizes(form: OutputForm) -> tuple[int, ...]:
    """Return the bytes of all tensors that live at a time while the sketches of two outputs are compared."""
    sums = (form.elements // _SUMMED + 1) * 8
    return min(form.elements, _AT_ONCE) * form.size_bytes // form.elements, _SUMMED * 8, sums, sums, sums, sums
