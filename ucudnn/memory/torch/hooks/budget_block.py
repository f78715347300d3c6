"""budget: training steps of any kind within a memory budget, while the training loop stays as it is."""

from contextlib import ExitStack
from types import TracebackType
from typing import Self, final

import torch

from ucudnn.errors import InvalidValueError
from ucudnn.memory.torch.device.host_block import host_memory as host_memory_bytes
from ucudnn.memory.torch.hooks.budgeted_steps import BudgetedSteps
from ucudnn.units import parse_budget, parse_bytes


@final
class budget:  # noqa: N801  # used as a function
    """A block in which training keeps a memory budget, whatever the step does.

        with ucudnn.memory.budget("12GiB"):
            for x, y in data:
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()

    Steps run eagerly, so sizes and branches may depend on values. What autograd saves for backward goes to the host's
    memory and comes back, or is recomputed by calling modules again. Losses and gradients are those of the plain loop,
    to the bit: a module is called again only after that gave the bits of its first call. The first steps are the
    slowest, because they show what that takes.

    Args:
        total: bytes, a text such as '12GiB', or a share of the device's memory such as '80%' or 0.8. On a GPU, of
            everything that the process has on it, as in `fit`. On a CPU, of tensors that operations read or made; one
            whose results do not fit runs again when others have left.
        device: the device whose memory counts; the current GPU by default, or the CPU where there is none.
        host_memory: most bytes of the host's memory for what leaves the device; half of the machine's by default.
        explains: lets `report` say who owns the peak; steps are slower then.

    Raises:
        BudgetError: if the process has more on the device already; in the block, if a step needs more. The error then
            has the place of PyTorch's.
        InvalidSizeError: if a size cannot be read.
    """

    def __init__(
        self,
        total: float | str,
        *,
        device: torch.device | str | None = None,
        host_memory: int | str | None = None,
        explains: bool = False,
    ) -> None:
        self._explains = explains
        self._host_bytes = None if host_memory is None else parse_bytes(host_memory)
        found = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
        if found.type == "cuda" and found.index is None:
            found = torch.device("cuda", torch.cuda.current_device())
        found = torch.device("cpu") if found.type == "cpu" else found  # as tensors say
        if found.type not in ("cuda", "cpu"):
            raise InvalidValueError(f"device {str(device)!r} has no memory that this can bound: give a GPU or 'cpu'")
        self._device = found
        memory = (
            torch.cuda.get_device_properties(found).total_memory if found.type == "cuda" else host_memory_bytes()[0]
        )
        self._total = parse_budget(total, memory)
        self._stacks: list[ExitStack] = []
        self._begun: BudgetedSteps | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._begun = BudgetedSteps(self._total, self._device, self._host_bytes, explains=self._explains)
            stack.callback(self._begun.close)
            stack.enter_context(self._begun.explained())
            stack.enter_context(self._begun.followed())
            self._stacks.append(stack.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stacks.pop().__exit__(kind, error, trace)

    @property
    def peak_bytes(self) -> int:
        """The most bytes at once so far: on a GPU of everything that the process had, on a CPU of tensors."""
        return 0 if self._begun is None else self._begun.peak_bytes()

    def report(self) -> str:
        """Return what left the device and what was computed again so far, and for which modules, for people."""
        return "no step has run within this budget" if self._begun is None else self._begun.report()
