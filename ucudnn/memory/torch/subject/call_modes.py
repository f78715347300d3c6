"""CallModes: what PyTorch keeps by thread or process and decides by which operators a step calls.

The code of a plan calls the operators of its trace, so these must be in a step as they were in the trace. What
operators read themselves while they run needs no look: precision of products (TF32), cuDNN's trials and determinism,
threads, denormal numbers. A `TorchDispatchMode` sees the code's operators as it sees those of the plain loop.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from operator import call
from threading import Thread
from typing import Any, final

import torch
from torch.autograd import forward_ad
from torch.backends import opt_einsum
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext

from ucudnn.errors import InvalidValueError

_DEVICES = "cpu", "cuda"
_einsum = vars(getattr(opt_einsum, "m", opt_einsum))  # attributes of the module itself take 30 us


@final
class CallModes:
    """The modes under which forward was traced, and backward outside of autocast.

    Raises:
        InvalidValueError: if a mode is on that no plan can follow.
    """

    def __init__(self) -> None:
        check_transforms()
        _check_hooks()
        self._values = values_of(READERS)
        self._region = torch.empty(0, 0, device="cpu", dtype=torch.float32, requires_grad=True)
        self._cast: Any = None

    def check(self) -> None:
        """Check before forward that the modes are those of the trace.

        Raises:
            InvalidValueError: if one of them differs, or one is on that no plan can follow.
        """
        found = values_of(READERS)
        if found != self._values:
            for name, before, now in zip(READERS, self._values, found, strict=True):
                if before != now and before is not None:  # what was not known in the trace is known from now on
                    raise InvalidValueError(
                        f"fit and the step must run under the same modes of PyTorch, and {name} was {before} in fit and"
                        f" is {now} now: call the step as fit was called, or fit it again"
                    )
            self._values = found
        check_transforms()
        _check_hooks()
        self._check_region()

    def check_backward(self) -> None:
        """Check before backward that it runs outside of autocast, as it was traced.

        Raises:
            InvalidValueError: if it does not.
        """
        if any(map(torch.is_autocast_enabled, _DEVICES)):
            raise InvalidValueError(
                "backward of a fitted step is called under torch.autocast, which would cast operators of backward, too,"
                " and its plan has them as they are outside: leave autocast before backward, as PyTorch advises"
            )

    def _check_region(self) -> None:
        """Check that no other forward of the step ran within the same region of autocast.

        Casts of weights stay in autocast's cache until the region ends, so that the plain loop adds up the gradients of
        both calls in the cast type. A tensor without elements that is cast in each call tells whether the region is
        another one.
        """
        if not (autocast_depth() and torch.is_autocast_cache_enabled()):
            return
        enabled = torch.is_autocast_enabled("cpu")
        torch.set_autocast_enabled("cpu", True)
        try:
            cast = torch.mm(self._region, self._region).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        finally:
            torch.set_autocast_enabled("cpu", enabled)
        earlier, self._cast = self._cast, cast
        if cast is earlier:
            raise InvalidValueError(
                "the step is called twice within one region of torch.autocast, whose cache makes both calls of the"
                " plain loop share the weights that it casts: give each call a region of its own, or call fit and the"
                " step within torch.autocast(..., cache_enabled=False)"
            )


def leave_autocast() -> None:
    """Leave all regions of autocast, as the loop does before backward; then its cache is empty.

    Where there is one, autocast's types become those of a new thread. A `Snapshot` enters the regions again.
    """
    depth = autocast_depth()
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    if depth:
        found: list[tuple[str, torch.dtype]] = []
        thread = Thread(target=lambda: found.extend((each, torch.get_autocast_dtype(each)) for each in _DEVICES))
        thread.start()
        thread.join()
        for device, dtype in found:
            torch.set_autocast_enabled(device, False)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(True)


def autocast_depth() -> int:
    """Return how many regions of autocast this thread is in. Ctrl-C cannot come between the two calls."""
    _, depth = map(call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))
    return int(depth)


def check_transforms() -> None:
    """Check that neither a transform nor a mode that replaces functions of PyTorch's is on.

    Raises:
        InvalidValueError: if one is.
    """
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        raise InvalidValueError(
            "a fitted step has no derivatives forward (torch.autograd.forward_ad, torch.func.jvp), and torch.func"
            " cannot transform its plan (grad, vjp, vmap): call the model, as step.model"
        )
    for index in range(torch._C._len_torch_function_stack()):
        mode: Any = torch._C._get_function_stack_at(index)
        if not isinstance(mode, DeviceContext):
            raise InvalidValueError(
                f"the TorchFunctionMode {type(mode).__name__} is on, and replaces functions that a plan does not call:"
                " call fit and the step outside of it"
            )


def _check_hooks() -> None:
    """Check that hooks of saved tensors are PyTorch's own, which give back what they are given.

    Raises:
        InvalidValueError: if they are others, which may change what backward of the plain loop reads.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None and not (getattr(hooks[0], "__module__", None) or "").startswith("torch."):
        raise InvalidValueError(
            "torch.autograd.graph.saved_tensors_hooks are on, and a plan keeps what backward reads by itself, without"
            " them: call fit and the step outside of them"
        )


def _order_of_attention() -> list[int] | None:
    """Return the order in which a GPU's attentions are asked; None where nothing has used a GPU yet.

    PyTorch changes it itself when a program first chooses an attention, on some GPUs.
    """
    if not torch.cuda.is_initialized():
        return None
    _choose_attention()
    order: list[int] = torch._C._get_sdp_priority_order()
    return order


@cache
def _choose_attention() -> None:
    """Let PyTorch choose an attention on the GPU, which does not compute it."""
    query = torch.zeros(1, 1, 1, 8, device="cuda", dtype=torch.float16)
    torch._fused_sdp_choice(query, query, query)


def _devices() -> tuple[Any, ...]:
    """Return the devices on which functions make tensors; () stands for the CPU."""
    modes = [*map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))]
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # also while PyTorch works without modes
    return tuple(mode.device for mode in (*modes, default) if isinstance(mode, DeviceContext))


READERS: dict[str, Callable[[], Any]] = {
    **{f"torch.is_autocast_enabled({each!r})": partial(torch.is_autocast_enabled, each) for each in _DEVICES},
    **{f"torch.get_autocast_dtype({each!r})": partial(torch.get_autocast_dtype, each) for each in _DEVICES},
    "torch.is_autocast_cache_enabled()": torch.is_autocast_cache_enabled,
    "whether there is a region of torch.autocast": lambda: autocast_depth() > 0,
    "torch.are_deterministic_algorithms_enabled()": torch._C._get_deterministic_algorithms,
    "torch.get_default_dtype()": torch.get_default_dtype,
    "the device of torch.set_default_device": _devices,
    "torch.backends.cudnn.enabled": torch._C._get_cudnn_enabled,
    "torch.backends.mkldnn.enabled": torch._C._get_mkldnn_enabled,
    "torch.backends.cuda.flash_sdp_enabled()": torch._C._get_flash_sdp_enabled,
    "torch.backends.cuda.mem_efficient_sdp_enabled()": torch._C._get_mem_efficient_sdp_enabled,
    "torch.backends.cuda.math_sdp_enabled()": torch._C._get_math_sdp_enabled,
    "torch.backends.cuda.cudnn_sdp_enabled()": torch._C._get_cudnn_sdp_enabled,
    "the order of torch.nn.attention.sdpa_kernel": _order_of_attention,
    "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()": torch._C._get_math_sdp_allow_fp16_bf16_reduction,
    "torch.backends.opt_einsum.enabled": partial(_einsum.get, "enabled"),
    "torch.backends.opt_einsum.strategy": partial(_einsum.get, "strategy"),
    "torch.nn.utils.parametrize.cached()": lambda: parametrize._cache_enabled,
}
"""What is compared, by the name in the error."""

SETTINGS: dict[str, Callable[[], Any]] = {
    **READERS,
    "the grad mode": torch.is_grad_enabled,
    "anomaly detection": torch.is_anomaly_enabled,
    "the number of threads": torch.get_num_threads,
    "torch.backends.cudnn.benchmark": torch._C._get_cudnn_benchmark,
    "torch.backends.cudnn.deterministic": torch._C._get_cudnn_deterministic,
}
"""What a step may change, and must leave as it was; a `Snapshot` puts it back."""

KERNELS = {name: read for name, read in SETTINGS.items() if name.startswith("torch.backends.cudnn")} | {
    name: SETTINGS[name]
    for name in (
        "torch.get_default_dtype()",
        "torch.are_deterministic_algorithms_enabled()",
        "torch.backends.mkldnn.enabled",
        "the number of threads",
    )
}
"""Those that choose kernels when an operator runs: the code of a plan would run it under others."""


def values_of(settings: Mapping[str, Callable[[], Any]]) -> list[Any]:
    """Return the values of settings as they are now."""
    return [read() for read in settings.values()]
