"""Common parts of the scripts for PyTorch: options, conditions, steps, times and memory. Not a script."""

import platform
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bench.tools.script import add_backend, command_line
from ucudnn.backends.cudnn.gpu.base import driver_version
from ucudnn.torch.calls.aten_kernels import held_bytes
from ucudnn.torch.calls.interceptor import Interceptor
from ucudnn.torch.factory import open_interceptor
from ucudnn.torch.gate.call_gate import CallGate
from ucudnn.torch.gate.gate_library import GateLibrary

MIB = 2**20
_BUILDING_S = 600
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten._convolution.default)
_BACKWARD = torch.ops.aten.convolution_backward.default


def torch_command_line(description: str | None, module: str) -> ArgumentParser:
    """Return a parser with --backend and --out; the default of --out is torch/SCRIPT.json."""
    parser = command_line(description, module, f"torch/{module.rpartition('.')[2]}.json")
    add_backend(parser)
    return parser


def conditions(device: torch.device) -> dict[str, str]:
    """Return the device and all versions."""
    versions = {"torch": str(torch.__version__), "python": platform.python_version()}
    if device.type == "cpu":
        return versions
    return {
        "device": torch.cuda.get_device_name(device),
        "driver": driver_version(),
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        **versions,
    }


def device_of(arguments: Namespace) -> torch.device:
    """Return the device of --backend; on a GPU, turn on `torch.backends.cudnn.benchmark` and TF32."""
    if arguments.backend == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit("error: PyTorch has no GPU; --backend cpu tries the script out")
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_tf32 = True
    return torch.device("cuda", torch.cuda.current_device())


def built_gate() -> CallGate:
    """Return the gate, which is built if no earlier program has built it.

    Raises:
        SystemExit: if it cannot be built.
    """
    library = GateLibrary()
    library.begin()
    library.join(_BUILDING_S)
    if library.gate is None:
        raise SystemExit("error: the gate cannot be built here: is there a C++ compiler?")
    return library.gate


def interceptor_for(arguments: Namespace, limit: str, **options: object) -> Interceptor:
    """Return the interceptor that `ucudnn.torch.enable` would turn on to measure before the first step."""
    found = open_interceptor(arguments.backend, {"workspace_limit": limit, "tune": "first", **options})
    assert isinstance(found, Interceptor)
    return found


def training_step(model: nn.Module, x: torch.Tensor, labels: torch.Tensor, rate: float = 1e-3) -> Callable[[], Any]:
    """Return a function that takes one step of SGD with momentum and returns the loss, a tensor."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def elapsed_ms(run: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds from the start of a call to the end of all that it launched."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (perf_counter() - begin) * 1e3


class ConvolutionMemory(TorchDispatchMode):
    """Measures the memory that each convolution allocates besides its results.

    Args:
        together: whether one call computes both gradients, because in ucudnn one gradient uses the other's memory.
            Otherwise each gradient is computed alone, because PyTorch allocates the second after the first is done.

    Attributes:
        largest_bytes: largest allocation of all convolutions.
        calls: number of convolutions.
    """

    def __init__(self, *, together: bool) -> None:
        super().__init__()
        self._together = together
        self.largest_bytes = 0
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; if it is a convolution, read the allocator's peak."""
        if func in _CONVOLUTIONS:
            return self._measured(func, *args)
        if func is not _BACKWARD:
            return func(*args, **(kwargs or {}))
        *rest, mask = args
        if self._together:
            self.calls += sum(mask) - 1
            return self._measured(func, *args)
        found: list[Any] = [None, None, None]
        for index, wanted in enumerate(mask):
            if wanted:
                found[index] = self._measured(func, *rest, [at == index for at in range(3)])[index]
        return tuple(found)

    def _measured(self, run: Callable[..., Any], *args: Any) -> Any:
        """Run a convolution and read the allocator's peak."""
        self.calls += 1
        if not torch.cuda.is_available():
            return run(*args)
        torch.cuda.reset_peak_memory_stats()
        found = run(*args)
        self.largest_bytes = max(self.largest_bytes, held_bytes())
        return found
