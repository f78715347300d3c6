"""The block of a plan in PyTorch's allocator: taken at once, its begin kept for the optimizer's state, its end held."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from ucudnn.memory.allocator.block import DIVIDER_BYTES, END_BYTES
from ucudnn.memory.allocator.compaction import Compaction, divider_bytes, kept_bytes
from ucudnn.memory.allocator.headroom import AllocatorRoom
from ucudnn.memory.allocator.replay import SMALL_BYTES
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.torch.device.allocator import lost_bytes
from ucudnn.memory.torch.device.stated_budget import StatedBudget
from ucudnn.memory.torch.device.weak_hook import weakly
from ucudnn.memory.torch.subject.step_program import StepProgram

_SPARED = 0.015  # share of the allocator's room; without it, steps on an H200 ran out of memory by 0.2 to 1.1 %


@final
class GpuMemory:
    """PyTorch's allocator of a GPU, from which the bytes of a block come."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, size: int) -> Tensor:
        """Take bytes. They go back when nobody holds the returned tensor any more.

        Raises:
            MemoryError: if there are too few.
        """
        try:
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    def holes(self) -> list[int]:
        """Return the bytes of the holes between tensors above 1 MiB, those of the stream that computes now."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        segments: Any = torch.cuda.memory_snapshot()
        return [
            int(piece["size"])
            for segment in segments
            if (segment["device"], segment["stream"], segment["segment_type"]) == (index, stream, "large")
            and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
            for piece in segment["blocks"]
            if piece["state"] == "inactive"
        ]

    def reserved_bytes(self) -> int:
        """Return what the allocator has from the GPU."""
        return torch.cuda.memory_reserved(self._device)

    def forget_peaks(self) -> None:
        """Let statistics of peaks begin anew."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def give_back(self) -> None:
        """Give pages that hold nothing back to the GPU."""
        torch.cuda.empty_cache()


@final
class TakenBlock:
    """Takes a block before the first step, and keeps bytes for the optimizer's state until its first update.

    One tensor of all bytes makes the allocator's range grow once; when it is freed, it leaves one hole. A single one is
    taken, because the range grows at its first gap that is large enough, and a gap between other tensors may be large
    enough for a part. A small tensor at the end of the hole stays, because the allocator would fill the range's last
    hole last. Tensors fill the holes that are there before, too, such as those in segments that do not grow. Else a
    tensor of the step would lie there, and all others elsewhere than planned. The budget counts these holes as lost.
    During the first update tensors fill all other holes but the largest one, so the state lies in the bytes that were
    kept, and what the update needs for a while in the largest hole.

    Attributes:
        taken: whether the block was taken; not where the allocator would have more than `most_bytes` with it.
        held_bytes: bytes of the tensors that stay as long as the block is used.
    """

    def __init__(
        self,
        memory: GpuMemory,
        layout: Compaction,
        most_bytes: int,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self._memory, self._layout, self._most_bytes = memory, layout, most_bytes
        self._kept: list[object] = []
        self._updated = False
        self._fillers: list[object] = []
        self.held_bytes = 0
        self._pads: list[object] = []
        self._hooks: list[Any] = []
        self.taken = self._take(layout)
        if self._kept:
            for optimizer in optimizers:
                before, after = weakly(self._begin_update), weakly(self._end_update)
                self._hooks.append(optimizer.register_step_pre_hook(before))
                self._hooks.append(optimizer.register_step_post_hook(after))

    def close(self) -> None:
        """Give back what is kept, and leave the optimizers alone."""
        self.release()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def release(self) -> None:
        """Give back what is held, until the block is taken again."""
        self._end_update()
        self._fillers.clear()
        self.held_bytes = 0

    def take_again(self) -> None:
        """Take the block again after something else gave its pages back, such as what measures another step.

        Nothing is kept for the optimizer's state any more. Once it is there, it has the bytes that were kept.
        """
        self.release()
        self._memory.give_back()
        size = self._layout.block_bytes - (kept_bytes(self._layout.kept) if self._updated else 0)
        self.taken = self._take(replace(self._layout, block_bytes=size, kept=()))

    def change(self, layout: Compaction) -> None:
        """Take the block of another plan, because its tensors find their places in no other one."""
        self._layout = layout
        self.take_again()

    def _take(self, layout: Compaction) -> bool:
        if self._memory.reserved_bytes() + layout.block_bytes > self._most_bytes:
            return False
        sizes = self._holes()
        try:
            self._fillers = [self._memory.take(size) for size in sizes]
            whole = self._memory.take(layout.block_bytes)
            del whole
            for size in layout.kept:
                if self._kept:
                    self._fillers.append(self._memory.take(DIVIDER_BYTES))
                self._kept.append(self._memory.take(size))
            body = self._memory.take(layout.block_bytes - kept_bytes(layout.kept) - END_BYTES)
            self._fillers.append(self._memory.take(END_BYTES))
        except MemoryError:
            self._end_update()
            self._fillers.clear()
            return False
        del body
        self.held_bytes = sum(sizes) + divider_bytes(layout.kept) + END_BYTES
        self._memory.forget_peaks()
        return True

    def _holes(self) -> list[int]:
        return sorted((size for size in self._memory.holes() if size > SMALL_BYTES), reverse=True)

    def _begin_update(self, *_: object) -> None:
        self._updated = True
        if not self._kept:
            return
        try:
            for size in self._holes()[1:]:
                self._pads.append(self._memory.take(size))
        except MemoryError:
            self._pads.clear()
        self._kept.clear()

    def _end_update(self, *_: object) -> None:
        self._kept.clear()
        self._pads.clear()


def allocator_room(
    program: StepProgram,
    stated: StatedBudget,
    optimizers: Sequence[torch.optim.Optimizer],
    frugal: Callable[[], MemoryPlan | None],
) -> AllocatorRoom | None:
    """Return what PyTorch's allocator may take from a GPU within a budget; None where nothing bounds it.

    `frugal` returns the plan of the first step.
    """
    tensor_bytes = stated.tensor_bytes
    if tensor_bytes is None or program.device.type != "cuda":
        return None
    return AllocatorRoom(
        tensor_bytes=tensor_bytes,
        lost_bytes=lost_bytes(program.device),
        spare_bytes=int(tensor_bytes * _SPARED),
        state_exists=any(optimizer.state for optimizer in optimizers),
        keeps_state=len(optimizers) == 1,
        in_one_block=not stated.fixed_segments,
        # The caller gives these tensors to backward, and may hold them longer.
        fixed=frozenset(tensor.storage for tensor in program.grad_outputs),
        frugal=frugal(),
    )


def taken_block(
    device: torch.device,
    layout: Compaction | None,
    stated: StatedBudget,
    optimizers: Sequence[torch.optim.Optimizer],
) -> TakenBlock | None:
    """Return the block of a layout, which is taken on a GPU; None without a layout or a budget, and elsewhere."""
    if layout is None or stated.budget is None or device.type != "cuda":
        return None
    return TakenBlock(GpuMemory(device), layout, stated.budget - stated.outside_bytes, optimizers)
