"""PyTorch's allocator of GPU memory: segments that grow, and a cap on what it takes.

By default the allocator takes memory in segments of fixed sizes. A tensor must lie within one of them, so memory that
is free in several pieces cannot hold it: the allocator takes more than the plan says, or, where it may not, cuDNN
silently runs another algorithm than the measured one. It also hands out up to 1 MiB more than was asked for, if the
rest of a piece is smaller. With expandable segments there is one range of addresses, which grows page by page, and a
tensor takes a multiple of 512 bytes. `AllocatorRoom` knows how much the allocator then takes for a plan.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ucudnn.memory.allocator.replay import PAGE_BYTES

_EXPANDABLE = "expandable_segments"
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def expand_segments(device: torch.device) -> str:
    """Let PyTorch's allocator grow its segments from now on, in the whole process, as far as it can be asked to.

    What the environment says about expandable segments is left alone, and its other settings stay. What exists stays
    where it is. Segments of which nothing is in use go back to the driver.

    Returns:
        Why segments do not grow; '' where they do, or the device has no such allocator.
    """
    if device.type != "cuda":
        return ""
    if torch.cuda.get_allocator_backend() != "native":
        return f"PyTorch's allocator is {torch.cuda.get_allocator_backend()}"
    settings = _settings()
    pairs = (each.partition(":") for each in settings.split(",") if each)
    given = {name.strip(): value.strip() for name, _, value in pairs}
    if _EXPANDABLE in given:
        return "" if given[_EXPANDABLE].lower() in ("true", "1") else f"the environment says {settings}"
    if "max_split_size_mb" in given:  # PyTorch cannot release segments with both: pytorch/pytorch#123548
        return f"the environment says {settings}, which does not go with {_EXPANDABLE}"
    wanted = ",".join(filter(None, (settings, f"{_EXPANDABLE}:True")))
    try:
        _set(wanted)
    except (RuntimeError, AttributeError) as error:
        return f"PyTorch refuses {wanted}: {str(error).partition(chr(10))[0]}"
    torch.cuda.empty_cache()
    return "" if _grows() else f"PyTorch ignores {wanted}"


def settings_restorer(device: torch.device) -> Callable[[], None]:
    """Return what gives PyTorch's allocator its settings of now, and the bound of what it takes."""
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return lambda: None
    settings, grew = _settings(), _grows()
    get: Any = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    share = None if get is None else float(get(device))

    def restore() -> None:
        if _grows() is not grew:  # what a text leaves out stays as it is
            _set(",".join(filter(None, (settings, f"{_EXPANDABLE}:{grew}"))))
        if _settings() != settings:
            _set(settings)
        if share is not None and float(get(device)) != share:
            torch.cuda.set_per_process_memory_fraction(share, device)

    return restore


def lost_bytes(device: torch.device) -> int:
    """Return the bytes of holes in the pages of a GPU that tensors have now; other pages go back to it."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def take_in_one_piece(device: torch.device, most_bytes: int) -> None:
    """Let PyTorch's allocator give free pages back, and take what it may have in all as one free piece.

    Where segments grow, the allocator takes pages between tensors as it needs them. When it has nearly all that it may
    have, it finds no piece for a large tensor, because it takes nothing unless a whole tensor more is allowed, even if
    a single page is missing beside a piece. Then it gives all free pages back, and the next step lays its tensors
    otherwise. From one piece all steps that ask for the same lay them alike.

    Args:
        device: the GPU.
        most_bytes: what the allocator may have.
    """
    torch.cuda.empty_cache()
    size = (most_bytes - torch.cuda.memory_reserved(device)) // PAGE_BYTES[1] * PAGE_BYTES[1]
    if size > 0:
        with suppress(torch.OutOfMemoryError), _disable_current_modes():  # others may have taken the GPU's memory
            torch.empty(size, dtype=torch.uint8, device=device)


def _settings() -> str:
    """Return the settings of the allocator: those that were made last, or those of the environment."""
    get: Any = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if get is not None:
        return str(get())
    known = _in_use()
    return next((str(known[name]) for name in _VARIABLES if known.get(name)), "")


def _set(settings: str) -> None:
    """Change settings of the allocator. PyTorch has no public function for it, and renamed the private one."""
    known: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (known or torch.cuda.memory._set_allocator_settings)(settings)


def _grows() -> bool:
    """Return whether the allocator says that its segments grow; it is believed where it says nothing."""
    return bool(_in_use().get(_EXPANDABLE, True))


def _in_use() -> dict[str, Any]:
    snapshot: Any = torch.cuda.memory._snapshot()
    return dict(snapshot.get("allocator_settings", {}))


@contextmanager
def allocator_cap(device: torch.device) -> Iterator[Callable[[int | None], None]]:
    """Yield what bounds the bytes that PyTorch's allocator of a GPU takes beyond those that it has on entry.

    None, and leaving the context, bring back the bound that was there. Elsewhere than on a GPU, and where PyTorch does
    not say which bound there is, nothing is bounded.
    """
    get: Any = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    if device.type != "cuda" or get is None:
        yield lambda _: None
        return
    torch.cuda.empty_cache()
    before = float(get(device))
    total = torch.cuda.get_device_properties(device).total_memory
    base = torch.cuda.memory_reserved(device)

    def allow(size: int | None) -> None:
        share = before if size is None else min(before, (base + max(0, size)) / total)
        torch.cuda.set_per_process_memory_fraction(share, device)

    try:
        yield allow
    finally:
        with suppress(RuntimeError):  # a GPU that failed must not hide its error
            allow(None)
