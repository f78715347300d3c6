"""BudgetedSteps: keeps a budget of training steps, which begin and end as the loop likes."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from time import perf_counter
from typing import Any, final

import torch
from torch import Tensor

from ucudnn.errors import BudgetError
from ucudnn.memory.torch.device.allocator import expand_segments, settings_restorer, take_in_one_piece
from ucudnn.memory.torch.device.stated_budget import outside_bytes
from ucudnn.memory.torch.hooks.guard import Guard, tried_bytes
from ucudnn.memory.torch.hooks.host_store import HostStore
from ucudnn.memory.torch.hooks.module_calls import ModuleCalls
from ucudnn.memory.torch.hooks.pressure import AllocatedBytes, CountedBytes, LiveBytes, Pressure
from ucudnn.memory.torch.hooks.saved_memory import SavedMemory
from ucudnn.torch.device.compilation import eagerly, stop_compiler
from ucudnn.units import bytes_down, bytes_up, format_bytes

_RESERVES = (256 * 2**20, 64 * 2**20, 32 * 2**20)  # for kernels that the first step loads, those that learn, and others
_LOOK_S = 5e-3  # between looks at kernels; to load a few MiB of them takes longer
_HOLES, _HOLE_BYTES = 0.02, 160 * 2**20  # between tensors, of what PyTorch's allocator may take, and in its pages
_FIRST_FREE = 0.15  # of the allocator's bytes, for workspaces in the first step, in which cuDNN chooses algorithms
# The step that says what calls take a device. The first one loads kernels, the next says what they take a GPU's host.
_FIRST_CHOICE, _FIRST_CHOICE_ON_GPU = 2, 3
_MOST_LEARNED = 8  # steps
_CALM = 2  # steps in a row that were as the one before, after which operations are guarded no longer
_TIDY_STEPS = 16  # between two that take the memory in one piece within the same limit, and twice as many each time
_SEEN_PART = 3  # of the limit, which hooks see in any step, because steps differ
_MOST_LINES = 10
_PARAMETERS, _GRADIENTS = "parameters and buffers", "their gradients"
_OTHERS = "the optimizer's state, inputs and what operations take for a while"


@final
class BudgetedSteps:
    """What keeps a budget.

    Attributes:
        outside: bytes that the process had beside PyTorch's allocator when they were read last.
    """

    def __init__(self, total: int, device: torch.device, host_bytes: int | None, *, explains: bool = False) -> None:
        self.total, self.device = total, device
        self._first_choice = _FIRST_CHOICE_ON_GPU if device.type == "cuda" else _FIRST_CHOICE
        self._steps, self._learned, self._guarded, self.outside = 0, 0, _CALM, 0
        self._backward, self._open, self._explains = False, True, explains
        self._owners, self._most = Counter[Any](), 0
        self._refusal: partial[BudgetError] | None = None
        self._restore = settings_restorer(device)
        counted = None if device.type == "cuda" else CountedBytes(total)
        self.alive: LiveBytes = AllocatedBytes(device) if counted is None else counted
        self._peak, self._grows = 0, False
        if device.type == "cuda":
            self._grows = not expand_segments(device)
            torch.cuda.empty_cache()
        # Whether the next step takes the memory in one piece; the limit of the last one that did, when another one may
        # within that limit, and how many steps were to pass between them.
        self._tidies, self._tidied = False, (0, 0, _TIDY_STEPS)
        try:
            if device.type == "cuda":
                self._check(torch.cuda.memory_allocated(device), outside_bytes(device) + _RESERVES[0])
            cap = self._bound(_RESERVES[0])
        except BaseException:
            self._restore()
            raise
        self._began_outside, self._next_look = self.outside, 0.0
        margins = (_HOLES + _HOLE_BYTES / cap, _FIRST_FREE) if counted is None else (0.0, 0.0)
        self._pressure = Pressure(self.alive, cap, *margins)
        if counted is None:
            self._pressure.follow = self._follow_kernels
        self._store = HostStore(device, host_bytes)
        self.memory = SavedMemory(device, self._pressure, self._store)
        if explains:
            self.memory.least_part = total  # all of them count
        self.calls = ModuleCalls(self.memory)
        self.guard = Guard(device, self.memory, self._exceeded, self.alive)
        self.calls.begin = self._turn_guard
        if counted is None:  # on a CPU the guard is on in all steps, and there is no queue
            self.calls.guarding_s = self.guard.host_s

    def _check(self, has: int, beside: int) -> None:
        if self.total <= has + beside:
            raise BudgetError(
                f"the budget is {bytes_down(self.total)}, and the process has {bytes_up(has)} of tensors and"
                f" {bytes_up(beside)} of context and kernels on {self.device}: raise it",
                kernel="",
                limit_bytes=self.total,
                required_bytes=beside + has,
            )

    def _bound(self, reserve: int) -> int:
        """Let PyTorch's allocator take what the budget leaves to it, and return how many bytes that is."""
        if self.device.type != "cuda":
            return self.total
        self.outside = outside_bytes(self.device)
        self._peak = max(self._peak, self.alive.most_reserved + self.outside)
        self.alive.most_reserved = 0  # later bytes meet those that the process has outside then
        cap = max(0, self.total - self.outside - reserve)
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), self.device)
        if torch.cuda.memory_reserved(self.device) > cap:
            torch.cuda.empty_cache()
        return cap

    def _follow_kernels(self) -> None:
        """Leave less to PyTorch's allocator as soon as more kernels are loaded than memory was kept for.

        A first step has loaded 303 MiB of them on an H200. In calls that are tried nobody may read the clock, because
        a call that does so is never repeated.
        """
        if not self._open or self.calls.trying or torch.cuda.is_current_stream_capturing():
            return
        if (begin := perf_counter()) < self._next_look:
            return
        outside = outside_bytes(self.device)
        reserve = max(_RESERVES[1], _RESERVES[0] - (outside - self._began_outside)) if not self._steps else _RESERVES[1]
        if self.total - outside - reserve < self._pressure.cap:
            self._pressure.allow(self._bound(reserve))
        end = perf_counter()
        self._next_look = end + max(_LOOK_S, 3 * (end - begin))

    def peak_bytes(self) -> int:
        """Return the most bytes at once so far: on a GPU of all that the process had, on a CPU of tensors."""
        self.alive.look()
        self._peak = max(self._peak, self.alive.most_reserved + self.outside)
        return self._peak

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Let an error about the device's memory be one about the budget."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise self._exceeded(error) from error
        except RuntimeError as error:
            # TorchScript hides the kind of an error.
            if self._refusal is not None and "TorchScript interpreter" in str(error):
                raise self._refusal() from error
            raise

    def close(self) -> None:
        """Bound the allocator no longer. What is saved still comes back when backward reads it."""
        self._open = self._tidies = False
        self.memory.gradients.end()  # a backward that failed has not
        self.memory.settle()
        self._restore()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Keep the budget of what this thread computes in a block."""
        pack = self._pack if self._explains else self.memory.pack
        with eagerly(), self.calls.followed(pack, self._unpack):
            self._turn_guard()
            try:
                yield
            finally:
                self.guard.end()

    def _turn_guard(self) -> None:
        """Guard operations until steps are steady; on a CPU always."""
        stop_compiler()
        if self._backward and torch._C._current_graph_task_id() < 0:
            self._end_failed_backward()
        if self._tidies and torch._C._current_graph_task_id() < 0 and not torch.cuda.is_current_stream_capturing():
            self._take_in_one_piece()
        self.guard.turn(on=self._open and (self._guarded > 0 or self.device.type != "cuda"))

    def _take_in_one_piece(self) -> None:
        pressure, (limit, _, steps) = self._pressure, self._tidied
        steps = 2 * steps if pressure.limit == limit else _TIDY_STEPS
        self._tidies, self._tidied = False, (pressure.limit, self._steps + steps, steps)
        pressure.room(None, 0)  # sees what the last step took
        take_in_one_piece(self.device, pressure.cap - _RESERVES[-1])  # kernels may be loaded until somebody looks
        self.alive.look()  # no step has taken the piece

    def _pack(self, tensor: Tensor) -> Any:
        packed = self.memory.pack(tensor)
        self._look_at_peak()
        return packed

    def _unpack(self, packed: Any) -> Tensor:
        if not self._backward:
            with suppress(RuntimeError):  # somebody looks at saved tensors, and no backward runs
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
                self._backward = self._pressure.in_backward = True
                if self._pressure.scattered:
                    self.memory.gradients.begin(self.memory.kept())
                self.calls.begin_backward(self._pressure.limit // _SEEN_PART)
        found = self.memory.unpack(packed)
        if self._explains:
            self._look_at_peak()
        return found

    def _look_at_peak(self) -> None:
        """Note who owns the memory if there is more than before."""
        if self._pressure.most > self._most:
            self._most, self._owners = self._pressure.most, self.memory.owners()
            kept = self.memory.kept()
            self._owners[_PARAMETERS] = sum(each.nbytes for each in kept)
            self._owners[_GRADIENTS] = sum(each.grad.nbytes for each in kept if each.grad is not None)
            self._owners[_OTHERS] = max(0, self._most - self._owners.total())

    def _end_backward(self) -> None:
        """Choose what is done in the next steps by what this one took."""
        self._backward = self._pressure.in_backward = False
        self.memory.gradients.end()
        self._steps += 1
        self.memory.owner = None
        pressure = self._pressure
        if self._open and (pressure.learning or self._steps & (self._steps - 1) == 0):  # less and less often
            pressure.allow(self._bound(_RESERVES[1 if pressure.learning else 2]))
        calm = pressure.end_step(tries=self.calls.trying)
        tried, self.calls.trying = self.calls.trying, False  # what is dropped from now on was still there
        is_tighter = not calm and pressure.target < self.calls.target
        if self._steps >= self._first_choice and not tried and (pressure.learning or is_tighter):
            self.calls.choose(self._store.ms_per_byte)
        is_unknown = pressure.learning or self.calls.trying or not pressure.steady
        self._guarded = _CALM if is_unknown else self._guarded - 1
        # What leaves must be seen, and comes back while backward is seen.
        self.calls.end_step(needs_little=pressure.needs_little and self._guarded <= 0 and not self.memory.ahead_bytes)
        if pressure.learning:
            self._learned += 1
            settled = self._steps > self._first_choice and not tried and not self.calls.trying
            pressure.learning = self._explains or (not settled and self._learned < _MOST_LEARNED)
        elif pressure.differs:
            pressure.learning, self._learned = True, 0
        is_due = pressure.limit != self._tidied[0] or self._steps >= self._tidied[1]
        is_usual = self._open and not pressure.learning and not self.calls.trying
        self._tidies = self._grows and pressure.unmapped and is_usual and is_due
        self._begin_step()

    def _begin_step(self, *, failed: bool = False) -> None:
        if self._pressure.learning:
            self.calls.record(failed=failed)
            self.calls.queues = self.device.type == "cuda" and self._steps + 1 >= self._first_choice
            self._store.waits = self.calls.waits = []
        else:
            self._store.waits = None
        self.memory.begin_step()

    def _end_failed_backward(self) -> None:
        """Begin another step: the program went on after an error in backward, of which nothing is learned."""
        self._backward = self._pressure.in_backward = False
        self.memory.gradients.end()
        self.memory.owner = None
        self.calls.end_step(needs_little=False)
        self._begin_step(failed=True)

    def _exceeded(self, error: torch.OutOfMemoryError) -> BudgetError:
        self.calls.hook_all()
        name = self._name(self.memory.owner)
        needed = max(self.alive.look()[0] + self.outside + tried_bytes(error), self.total + 1)
        self._refusal = partial(  # an error itself would hold what its frames hold
            BudgetError,
            f"the step needs at least {bytes_up(needed)} when {name} runs, the budget is {bytes_down(self.total)},"
            " and no more saved tensors can leave the device: raise it, or make the mini-batch smaller",
            kernel=name,
            limit_bytes=self.total,
            required_bytes=needed,
        )
        return self._refusal()

    def _lines(self, what: str, counted: Counter[Any]) -> Iterator[str]:
        yield f"{what}: {format_bytes(sum(counted.values()))}"
        for owner, size in counted.most_common(_MOST_LINES):
            yield f"{what} of {self._name(owner)}: {format_bytes(size)}"

    def _name(self, owner: Any) -> str:
        if owner is None or isinstance(owner, str):
            return owner or "what runs outside of modules"
        return self.calls.names.get(owner, type(owner).__name__)

    def report(self) -> str:
        """Return what left the device and what was computed again so far, for people."""
        memory = self.memory
        lines = [
            f"{self._steps} steps on {self.device} by hooks, budget {format_bytes(self.total)}",
            f"peak of tensors: {format_bytes(self._pressure.most)}",
            f"host memory: {format_bytes(self._store.taken_bytes)}",
        ]
        if self.guard.slower:
            lines.append(f"convolutions that took a slower algorithm for want of memory: {self.guard.slower}")
        if self._explains:
            lines += self._lines("peak", self._owners)
        lines += [*self._lines("offloaded", memory.offloaded), *self._lines("recomputed", memory.recomputed)]
        return "\n".join(lines)
