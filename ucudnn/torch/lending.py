"""Lending: whether anybody but autograd has a gradient, so that what was read of it may serve as workspace.

Autograd hands the gradient of an output to the convolution, and lets go of it afterwards. Where nobody else has it, and
nothing else its memory, it is never seen again: PyTorch's own AccumulateGrad takes over gradients by the same sign.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Thread
from typing import Any, NamedTuple, final

import torch

from ucudnn.errors import BackendUnavailableError, SettingsError
from ucudnn.settings import Settings
from ucudnn.torch.aten_kernels import Gradients, Stock


@final
class Counts(NamedTuple):
    """References to a tensor.

    Attributes:
        python: to the Python object.
        tensor: to the tensor behind it.
        memory: to the Python object of its storage.
        storage: to the storage behind that.
        owned: whether its memory is PyTorch's, and not that of a library which lent it.
    """

    python: int
    tensor: int
    memory: int
    storage: int
    owned: bool


def counts_of(tensor: Any) -> Counts:
    """Return how many references there are, those of the caller and of this call included."""
    memory = tensor.untyped_storage()
    private: Any = torch._C
    return Counts(
        sys.getrefcount(tensor),
        tensor._use_count(),
        sys.getrefcount(memory),
        private._storage_Use_Count(memory._cdata),
        memory.resizable(),
    )


Probing = Callable[[Callable[..., Gradients]], AbstractContextManager[Stock]]
"""Sends gradients of CPU tensors to a kernel, and gives PyTorch's own."""


def check_lending(settings: Settings) -> None:
    """Refuse settings under which no gradient can be lent.

    Raises:
        SettingsError: for ranks that measure together.
    """
    if settings.benchmark_devices == "ranks":
        raise SettingsError(
            "lend_gradients: which gradients are lent is for each rank to see, so that ranks cannot plan together: let"
            " each measure for itself, without UCUDNN_BENCHMARK_DEVICES=ranks"
        )


def counts_alone(probing: Probing) -> Counts:
    """Return the counts that `Switch.backward` finds of a gradient that autograd alone has.

    Raises:
        BackendUnavailableError: if this PyTorch does not tell it from one that somebody has.
    """
    version = f"lend_gradients: PyTorch {torch.__version__}"
    probe = _Probe()
    # Of its own, for modes and tracing are the thread's; they have tensors as well.
    thread = Thread(target=probe.run, args=(probing,), daemon=True)
    thread.start()
    thread.join()
    if probe.error is not None:
        raise BackendUnavailableError(f"{version} counts no references: {probe.error}") from probe.error
    alone, *others = probe.counts
    if alone in others or not alone.owned:
        raise BackendUnavailableError(f"{version} does not tell who has a gradient: {alone}")
    return alone


@final
class _Probe:
    """Finds counts where `Switch.backward` does: in a method that PyTorch calls."""

    def __init__(self) -> None:
        self.counts: list[Counts] = []
        """Of a gradient that autograd alone has, and of some that somebody has."""
        self.error: Exception | None = None
        self._stock: Stock | None = None

    def run(self, probing: Probing) -> None:
        """Let autograd compute gradients."""
        try:
            with probing(self.backward) as self._stock:
                self._run()
        except Exception as error:  # noqa: BLE001, for whatever it is, nothing can be told
            self.error = error

    def backward(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *arguments: Any) -> Gradients:
        """Count, and let PyTorch compute."""
        self.counts.append(counts_of(grad))
        assert self._stock is not None
        return self._stock.backward(grad, x, weight, *arguments)

    def _run(self) -> None:
        x = torch.ones(1, 1, 1, 1, device="cpu")
        w = torch.ones(1, 1, 1, 1, device="cpu", requires_grad=True)
        kept: list[object] = []
        keepers: list[Callable[[torch.Tensor], None]] = [
            kept.append,
            lambda grad: kept.append(grad.detach()),
            lambda grad: kept.append(grad.untyped_storage()),
        ]

        def output() -> torch.Tensor:
            return torch.nn.functional.conv2d(x, w)

        output().square().sum().backward()
        output().backward(torch.ones(1, 1, 1, 1, device="cpu"))
        for keep in keepers:
            hooked = output()
            hooked.register_hook(keep)
            hooked.square().sum().backward()
        torch.autograd.grad(output().square().sum(), w, create_graph=True)
