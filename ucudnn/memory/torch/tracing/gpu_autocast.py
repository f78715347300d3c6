"""Autocast of GPUs on the CPU: fake tensors lie there, and PyTorch's autocast casts by lists of the device.

On a GPU, softmax, sums, norms and powers of 16 bits become float32, and poolings stay as they are; on a CPU it is the
other way round. So peaks differ.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel
from torch.utils._pytree import tree_map_only

_TO_DTYPE = frozenset({
    "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
})  # fmt: skip
_TO_16_BITS = frozenset({
    "_convolution", "addmv", "addr", "chain_matmul", "convolution", "einsum", "linalg_multi_dot", "mv",
})  # fmt: skip
_AS_ON_CPUS = frozenset({
    "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell",
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "cudnn_convolution",
    "cudnn_convolution_transpose", "dot", "gru_cell", "index_put", "lstm_cell", "norm.Scalar", "norm.ScalarOpt_dim",
    "rnn_relu_cell", "rnn_tanh_cell", "scatter_add", "tensordot", "vdot",
})  # fmt: skip
"""Operators that call others of the lists, that have no kernel on the CPU, or that widen the narrower argument."""


@contextmanager
def gpu_autocast() -> Iterator[None]:
    """Let autocast on the CPU cast by the lists of CUDA; regions that are entered meanwhile, in all threads."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    of_cpu, of_gpu = ({*registered(f"Autocast{key}")} for key in ("CPU", "CUDA"))
    library = Library("aten", "IMPL")
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # of kernels that are replaced
            for name in sorted(each.removeprefix("aten::") for each in of_cpu ^ of_gpu if each.startswith("aten::")):
                if f"aten::{name}" in of_cpu:
                    library.impl(name, fallthrough_kernel, "AutocastCPU")
                elif name not in _AS_ON_CPUS:
                    library.impl(name, _kernel(name), "AutocastCPU")
        yield
    finally:
        library._destroy()


def _kernel(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    if name in ("softmax.int", "log_softmax.int"):
        return partial(_softmax, operator, getattr(torch.ops.aten, f"_{packet}").default)
    return partial(_with_dtype if name in _TO_DTYPE else _cast, operator, name)


def _softmax(operator: Any, fused: Any, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Compute in float32; on a GPU the kernel itself reads float16, so that there is no copy of x."""
    with torch._C._DisableAutocast():
        if dtype is None and x.dtype is torch.float16:
            return fused(x, dim, True)
        return operator(x, dim, torch.float32 if dtype is None and _has_16_bits(x) else dtype)


def _with_dtype(operator: Any, _: str, *args: Any, **kwargs: Any) -> Any:
    """Let the operator sum up in float32, unless it is told a type."""
    if kwargs.get("dtype") is None and _has_16_bits(args[0]):
        kwargs["dtype"] = torch.float32
    with torch._C._DisableAutocast():
        return operator(*args, **kwargs)


def _cast(operator: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype("cpu") if name in _TO_16_BITS else torch.float32

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor

    args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
    with torch._C._DisableAutocast():
        return operator(*args, **kwargs)


def _has_16_bits(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() == 2
