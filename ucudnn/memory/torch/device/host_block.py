"""HostBlock: one block of host memory, pinned where a GPU copies from and to it.

PyTorch's own pinned allocations are rounded up to powers of two and kept in a cache. So the block is memory of the
system, of exactly the size that is wanted, which the CUDA runtime pins (cudaHostRegister) and releases
(cudaHostUnregister). It begins on a page of its own, because only whole pages are pinned.

To pin 2 GiB took 0.82 s on an H200's host as long as the runtime had the pages made one by one. It took 0.09 s with
pages of 2 MiB that several threads had made before.
"""

import mmap
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from ucudnn.errors import BackendError, BudgetError
from ucudnn.units import bytes_down, bytes_up

_DEFAULT_SHARE = 0.5  # of the machine's memory, where the caller names no limit
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of Linux, which Python does not name
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all GPUs
_UNLIMITED = 1 << 60  # cgroup v1 writes a number like this where there is no limit


@final
class HostBlock:
    """Host memory in one piece of some bytes, pinned or not.

    Attributes:
        memory: its bytes; none after `release`.

    Raises:
        BackendError: if CUDA cannot pin it.
        BudgetError: if it is larger than `host_bytes` (half of the machine's memory by default), or than the memory
            that is left to this process.
    """

    def __init__(self, size: int, *, pinned: bool, host_bytes: int | None = None) -> None:
        check_host_memory(size, host_bytes)
        self.memory: Tensor = pages(size, pinned=pinned) if size else torch.empty(0, dtype=torch.uint8)
        self._release: Any = None
        if pinned and size:
            address = self.memory.data_ptr()
            _register(address, size)
            # The memory must live until it is no longer pinned, whatever becomes of this object.
            self._release = weakref.finalize(self, _unregister, address, self.memory)

    def release(self) -> None:
        """Free the memory, which nothing may copy from or to any more. A second call does nothing."""
        if self._release is not None:
            self._release()
        self.memory = torch.empty(0, dtype=torch.uint8)


def pages(size: int, *, pinned: bool) -> Tensor:
    """Return memory of the system in bytes, as zeros; what is to be pinned is there already, in large pages.

    A process that is forked has zeros in the place of what is to be pinned, because pinned pages would be copied for
    it. It shares other memory.
    """
    if not pinned:
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    private = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, _WIPE_ON_FORK):
        with suppress(OSError):  # a kernel without it
            private.madvise(advice)
    found = torch.frombuffer(private, dtype=torch.uint8)
    found[:: mmap.PAGESIZE].zero_()
    return found


def check_host_memory(size: int, host_bytes: int | None = None, root: Path = Path("/")) -> None:
    """Check that a block of some bytes fits; the other arguments are those of `host_headroom`.

    Raises:
        BudgetError: if it does not; the message says what it needs and what there is.
    """
    cap, left = _bounds(host_bytes, root)
    if size <= min(cap, left):
        return
    whose = "half of the machine's memory" if host_bytes is None else "the limit for host memory"
    why = f"{whose} is {bytes_down(cap)}" if size > cap else f"{bytes_down(left)} are left to this process"
    raise BudgetError(
        f"the plan needs {bytes_up(size)} of host memory for what it offloads, and {why}: raise the limit"
        " (host_memory=), free memory, raise the device's budget, or take a policy that offloads less",
        kernel="",
        limit_bytes=min(cap, left),
        required_bytes=size,
    )


def host_headroom(host_bytes: int | None = None, root: Path = Path("/")) -> int:
    """Return the bytes that a block of host memory may have now; by default at most half of the machine's memory."""
    return min(_bounds(host_bytes, root))


def _bounds(host_bytes: int | None, root: Path) -> tuple[int, int]:
    """Return the most bytes of a block by the user's or the default limit, and how many are left to this process."""
    total, left = host_memory(root)
    return int(total * _DEFAULT_SHARE) if host_bytes is None else host_bytes, left


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return the bytes of the machine's memory, and how many of them are left to this process.

    The container's limit counts, which cgroups of version 2 or 1 set. What the kernel can take back from its file cache
    counts as left.
    """
    found = dict(line.split(":", 1) for line in _lines(root / "proc/meminfo") if ":" in line)
    numbers = {name: int(value.split()[0]) * 1024 for name, value in found.items()}
    total = numbers.get("MemTotal", _UNLIMITED)
    return total, max(0, min([numbers.get("MemAvailable", total), *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield the bytes that each memory cgroup of this process, and those around it, leave."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = top / path.strip().lstrip("/")
        # In a container, the path may be the one outside of it, which is not there: then the top is its own group.
        for each in (folder, *folder.parents):
            limit, current = (_number(each / name) for name in names[:2])
            if limit is not None and current is not None and limit < _UNLIMITED:
                cached = dict(entry.split() for entry in _lines(each / "memory.stat"))
                yield limit - current + int(cached.get(names[2], 0))
            if each == top:
                break


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    text = "".join(_lines(path))
    return int(text) if text.isdigit() else None


def _register(address: int, size: int) -> None:
    status = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))
    if status:
        with suppress(RuntimeError):  # the next launch would report this error in the place of its own
            torch.zeros(1, device="cuda")
        raise BackendError(f"CUDA cannot pin {bytes_up(size)} of host memory: error {status} of cudaHostRegister")


def _unregister(address: int, _memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
