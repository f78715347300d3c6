"""Contention: by how much a step takes longer because copies share memory and link with it, and for no other reason.

Three kinds of steps take turns in one process, so that a drift of clocks meets all of them:

- base: the plan without copies;
- beside: the same plan, while copies of the sizes of another plan's run freely beside it;
- planned: that other plan.

Free copies move bytes of their own: as many pieces of the same sizes to the host from the begin of forward on, and from
the host from the begin of backward on. They begin together with the compute of their phase, and then compute and copies
never wait for each other within a step. So what `beside` takes more than `base` is contention, and what `planned` takes
more than both is waiting.

The buffer of free copies comes on top of the step's memory. It has as many bytes as leave in one step, on the device
and again in pinned host memory beside the plan's own block. Both are freed afterwards.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median
from typing import Any, Self, final

import torch

from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.torch.device.host_block import HostBlock
from ucudnn.memory.torch.device.step_clock import mark, passed_ms
from ucudnn.memory.torch.device.stream_copies import copy_on
from ucudnn.memory.torch.measuring.training_step import TrainingStep

MOST_EXTRA = 0.01
"""Share of the base step by which a plan whose copies are hidden may exceed base and contention."""

_ALIGNMENT = 512  # bytes; copies between aligned addresses are fastest


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ContentionFigures:
    """What three kinds of steps took that took turns; sizes in bytes, times in milliseconds.

    Attributes:
        to_host: bytes that free copies moved to the host in each step.
        from_host: bytes that they moved back.
        pieces: copies in each step, both directions together.
        buffer: bytes of the free copies' buffer on the device; the host has as many.
        base_ms: median time of the plan without copies.
        beside_ms: median time of the same plan beside free copies.
        planned_ms: median time of the plan that copies.
        contention_ms: by how much a step beside free copies takes longer than base; the median over rounds.
        contention_low_ms: the least of these differences.
        contention_high_ms: the largest of them.
        extra_ms: by how much a step of the plan that copies takes longer than base; the median over rounds.
        extra_low_ms: the least of these differences.
        extra_high_ms: the largest of them.
        within: whether the plan takes no longer than base, contention (none if it is negative) and `MOST_EXTRA` of
            base.
        rounds: time of base, beside and planned in each round.
    """

    to_host: int
    from_host: int
    pieces: int
    buffer: int
    base_ms: float
    beside_ms: float
    planned_ms: float
    contention_ms: float
    contention_low_ms: float
    contention_high_ms: float
    extra_ms: float
    extra_low_ms: float
    extra_high_ms: float
    within: bool
    rounds: tuple[tuple[float, float, float], ...]

    @classmethod
    def of(cls, copies: "FreeCopies", rounds: Sequence[tuple[float, float, float]]) -> Self:
        """Return the figures of rounds of base, beside and planned."""
        base, beside, planned = map(median, zip(*rounds, strict=True))
        contention = [beside - base for base, beside, _ in rounds]
        extra = [planned - base for base, _, planned in rounds]
        return cls(
            to_host=copies.bytes_of(to_host=True),
            from_host=copies.bytes_of(to_host=False),
            pieces=copies.pieces,
            buffer=copies.buffer_bytes,
            base_ms=base,
            beside_ms=beside,
            planned_ms=planned,
            contention_ms=median(contention),
            contention_low_ms=min(contention),
            contention_high_ms=max(contention),
            extra_ms=median(extra),
            extra_low_ms=min(extra),
            extra_high_ms=max(extra),
            within=median(extra) <= max(0.0, median(contention)) + MOST_EXTRA * base,
            rounds=tuple(rounds),
        )


@final
class FreeCopies:
    """Copies of the sizes and in the order of a plan's, between buffers of their own.

    On a GPU each direction has a stream. On a CPU a copy is done when the function that begins it returns, as is one of
    a plan.

    Args:
        plan: the plan.
        device: the device.

    Attributes:
        pieces: number of copies in a step, both directions together.
        buffer_bytes: bytes of the buffer on the device; the host's has as many.
    """

    def __init__(self, plan: MemoryPlan, device: torch.device) -> None:
        kinds = {True: ActionKind.OFFLOAD, False: ActionKind.PREFETCH}
        self._sizes = {
            to_host: [plan.graph.sizes[target] for each, target in plan.actions if each is kind]
            for to_host, kind in kinds.items()
        }
        self._device = device
        self.pieces = sum(map(len, self._sizes.values()))
        self._begins = {to_host: _begins(sizes) for to_host, sizes in self._sizes.items()}
        self.buffer_bytes = max(begins[-1] for begins in self._begins.values())
        self._buffer = torch.zeros(self.buffer_bytes, dtype=torch.uint8, device=device)
        on_gpu = device.type == "cuda"
        self._streams = {to_host: torch.cuda.Stream(device) for to_host in kinds} if on_gpu else {}
        self._block = HostBlock(self.buffer_bytes, pinned=on_gpu)

    def bytes_of(self, *, to_host: bool) -> int:
        """Return the bytes that are copied in one direction in a step."""
        return sum(self._sizes[to_host])

    def begin(self, *, to_host: bool) -> None:
        """Begin the copies of one direction when the compute so far has ended; compute does not wait for them."""
        stream = self._streams.get(to_host)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        for begin, size in zip(self._begins[to_host], self._sizes[to_host], strict=False):
            here, there = (memory[begin : begin + size] for memory in (self._buffer, self._block.memory))
            target, source = (there, here) if to_host else (here, there)
            if stream is None:
                target.copy_(source)
            else:
                copy_on(stream, target, source)

    def settle(self) -> None:
        """Let compute that is issued from now on wait for all copies."""
        for stream in self._streams.values():
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def close(self) -> None:
        """Wait for all copies and free the buffers."""
        for stream in self._streams.values():
            stream.synchronize()
        self._block.release()
        self._buffer = torch.empty(0, dtype=torch.uint8)


def measure_contention(
    base: TrainingStep, planned: TrainingStep, plan: MemoryPlan, device: torch.device, *, rounds: int, warmup: int
) -> ContentionFigures:
    """Return what the copies of a plan cost a step by contention, and what the plan costs.

    Args:
        base: the step by the plan without copies.
        planned: the step by the plan.
        plan: the plan.
        device: where both run.
        rounds: how many steps of each kind are timed.
        warmup: how many steps of each kind come before them.

    Raises:
        BackendError: if CUDA cannot pin the free copies' memory.
        BudgetError: if the host has no room for it.
        RuntimeError: if the device's memory runs out.
    """
    with closing(FreeCopies(plan, device)) as copies:
        kinds: list[Callable[[], Any]] = [base.run, _beside(base, copies), planned.run]
        found = []
        for number in range(warmup + rounds):
            marks: dict[int, tuple[Any, Any]] = {}
            for place in range(len(kinds)):  # each kind comes first, second and last equally often
                kind = (number + place) % len(kinds)
                marks[kind] = _marked(base, kinds[kind], copies, device)
            found.append(marks)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times = [tuple(passed_ms(*marks[kind]) for kind in range(len(kinds))) for marks in found[warmup:]]
        return ContentionFigures.of(copies, [(first, second, third) for first, second, third in times])


def _marked(step: TrainingStep, run: Callable[[], Any], copies: FreeCopies, device: torch.device) -> tuple[Any, Any]:
    """Take a step, and return marks before and behind it; copies of it do not reach into the next one."""
    step.clear()
    begin = mark(device)
    run()
    end = mark(device)
    copies.settle()
    return begin, end


def _beside(step: TrainingStep, copies: FreeCopies) -> Callable[[], Any]:
    """Return what takes a step while copies run beside it."""
    own = step.loss

    def loss(*args: Any) -> torch.Tensor:
        result = own(*args)
        copies.begin(to_host=False)
        return result

    beside = replace(step, loss=loss)

    def run() -> Any:
        copies.begin(to_host=True)
        return beside.run()

    return run


def _begins(sizes: Sequence[int]) -> list[int]:
    """Return the first byte of each piece, and where the last one ends."""
    return [*accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)]
