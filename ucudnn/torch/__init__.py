"""PyTorch: every convolution of a program under a workspace limit, without touching the model.

`enable` takes over `aten::_convolution` and `aten::convolution_backward`, to which all of PyTorch's convolutions come,
forward and backward, plain and transposed, in one to three dimensions; `disable` gives them back. What is not computed
here goes to PyTorch's own kernels, and is counted.
"""

from typing import Any, final

try:
    import torch
except ImportError as error:
    # With its name, `python -m ucudnn.torch` says so in one line.
    needed = "ucudnn.torch needs PyTorch 2.10 or newer: pip install 'ucudnn[torch]'"
    raise ImportError(f"{needed} ({error})", name=__name__) from error

from ucudnn.torch.factory import open_interceptor
from ucudnn.torch.interceptor import Interceptor
from ucudnn.torch.overrides import process_overrides
from ucudnn.torch.summary import Summary, summarize

__all__ = ["Enabled", "Summary", "convert", "disable", "enable", "report"]


@final
class Enabled:
    """What `enable` turned on; as a context, it is turned off at the end, and what was on before is on again."""

    def __init__(self, switch: Interceptor, before: Interceptor | None) -> None:
        self._switch = switch
        self._before = before

    def __enter__(self) -> "Enabled":
        return self

    def __exit__(self, *exception: object) -> None:
        process_overrides.use(self._before)

    def report(self, *, repeats: int = 0) -> Summary:
        """Return what went through handles since it was turned on; see `ucudnn.torch.report`."""
        return summarize([self._switch], repeats=repeats)


def enable(*, backend: str | None = None, **options: Any) -> Enabled:
    """Send every convolution of the process to a handle, from now on; each GPU has a handle of its own.

    Args:
        backend: 'auto' and 'cudnn' take over the convolutions of CUDA tensors, 'cpu' those of CPU tensors, which is
            slow: for tests. None for what UCUDNN_BACKEND says, else 'auto'.
        **options: of `ucudnn.Handle`: workspace_limit, total_workspace, policy, database, benchmark_devices, ...; None
            and what is not given come from the environment.

    Returns:
        A context that turns it off again.

    Raises:
        SettingsError: if an option is not known, or has a value that it may not have.
        BackendUnavailableError: if PyTorch has no NVIDIA GPU, or is too old.
    """
    return turn_on(open_interceptor(backend, options))


def turn_on(interceptor: Interceptor) -> Enabled:
    """Send all convolutions of the process to an interceptor; `enable` and `python -m ucudnn.torch` make one each."""
    before = process_overrides.switch
    process_overrides.use(interceptor)
    return Enabled(interceptor, before)


def disable() -> None:
    """Give all convolutions back to PyTorch, but for those of converted modules."""
    process_overrides.use(None)


def convert(module: torch.nn.Module, *, backend: str | None = None, **options: Any) -> torch.nn.Module:
    """Send the convolutions of one module and its children to a handle; layers have the names of the module tree.

    A copy of the module goes through the same handle, what was saved and loaded again through none.

    Args:
        module: gets hooks at its convolutions.
        backend: as in `enable`.
        **options: as in `enable`.

    Returns:
        The module.

    Raises:
        SettingsError: if an option is not known, or has a value that it may not have.
        BackendUnavailableError: if PyTorch has no NVIDIA GPU, or is too old.
    """
    switch = open_interceptor(backend, options)
    switch.names.give(module)
    process_overrides.add(switch)
    return module


def report(*, repeats: int = 0) -> Summary:
    """Return what went through handles since `enable`, and in converted modules, and what was left to PyTorch and why.

    Args:
        repeats: how often each kernel's plan is run now to be timed, on random operands, and on GPUs PyTorch's own
            kernel beside it, with the memory that it takes; 0 tells what was planned only.
    """
    switches = [*process_overrides.converted, *([process_overrides.switch] if process_overrides.switch else [])]
    return summarize(switches, repeats=repeats)
