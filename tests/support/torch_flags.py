"""PyTorch's flags of a process: a test that changes them must not change how later ones compute and are planned."""

import sys
from contextlib import contextmanager


@contextmanager
def kept_torch_flags():
    """Restore after the block what PyTorch's flags were before it; if PyTorch is not imported yet, they stay."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "_C"):  # tests put other objects in its place
        yield
        return
    before = [read() for read, _ in _flags(torch)]
    yield
    for (_, write), value in zip(_flags(torch), before, strict=True):
        write(value)


def _flags(torch):
    """Return what reads and what writes each flag; the older flags come first, because they set the newer ones, too."""
    backends = torch.backends
    return [
        (torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        _attribute(backends.cudnn.conv, "fp32_precision"),
        _attribute(backends.cudnn.rnn, "fp32_precision"),
        _attribute(backends.cuda.matmul, "fp32_precision"),
        _attribute(backends.mkldnn.matmul, "fp32_precision"),
        _attribute(backends.cudnn, "enabled"),
        _attribute(backends.cudnn, "benchmark"),
        _attribute(backends.cudnn, "deterministic"),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.is_grad_enabled, torch._C._set_grad_enabled),
    ]


def _attribute(owner, name):
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)
