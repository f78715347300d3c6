"""PyTorch: faster convolutions, or every convolution within a workspace limit, without a change to the model.

`enable` takes over `aten::_convolution` and `aten::convolution_backward`, to which all convolutions of PyTorch come:
forward and backward, plain and transposed, in one to three dimensions. `disable` gives them back. A convolution that is
not computed here goes to PyTorch's own kernels, and is counted.
"""

from os import PathLike
from typing import Any, final

try:
    import torch
except ImportError as error:
    needed = "ucudnn.torch needs PyTorch 2.10 or newer: pip install 'ucudnn[torch]'"
    # The name lets `python -m ucudnn.torch` print this as one line.
    raise ImportError(f"{needed} ({error})", name=__name__) from error

from ucudnn.handle import save_plans as save_handles
from ucudnn.reporting.output_file import report_at_exit
from ucudnn.torch.factory import open_interceptor
from ucudnn.torch.overrides import AnyInterceptor, process_overrides
from ucudnn.torch.summary import Summary, summarize

__all__ = ["Enabled", "Summary", "convert", "disable", "enable", "report", "save_plans"]


@final
class Enabled:
    """What `enable` turned on. As a context, it turns that off at the end, and what was on before on again."""

    def __init__(self, interceptor: AnyInterceptor, before: AnyInterceptor | None) -> None:
        self._interceptor = interceptor
        self._before = before

    def __enter__(self) -> "Enabled":
        return self

    def __exit__(self, *exception: object) -> None:
        process_overrides.use(self._before)

    def report(self, *, repeats: int = 0) -> Summary:
        """Return what went through its handles so far; see `ucudnn.torch.report`."""
        return summarize([self._interceptor], repeats=repeats)

    def save_plans(self, path: str | PathLike[str]) -> None:
        """Write the plans of its handles to a file; see `ucudnn.torch.save_plans`."""
        save_handles(list(self._interceptor.handles().values()), path)


def enable(*, backend: str | None = None, **options: Any) -> Enabled:
    """Send all convolutions of the process to a handle from now on; each GPU has a handle of its own.

    Args:
        backend: 'auto' and 'cudnn' take over the convolutions of CUDA tensors. 'cpu' takes over those of CPU tensors,
            which is slow and meant for tests. None: as UCUDNN_BACKEND says, else 'auto'.
        **options: arguments of `ucudnn.Handle`, such as workspace_limit, total_workspace, policy, plans, database and
            benchmark_devices. An option that is None or missing comes from the environment. With `strict`, a
            convolution that fails here is an error. By default PyTorch's own kernel computes it, which knows no limit.
            workspace_limit='auto' is the default on GPUs: PyTorch's own kernels run first, and others are tried while
            the program runs, in memory that the peak of PyTorch's own steps leaves. `trial_share`, 0.05 by default, is
            then the largest part of the time that trials may lose, and `database` keeps their times. The other options
            belong to a stated limit. With one of them, with backend='cpu', or where the environment sets one, a limit
            that is not stated is 64 MiB. Within a stated limit, heuristic plans are made at once, and others are tried
            while the program runs. `tune='first'` measures before the first run instead. `memory_limit` bounds live
            bytes and workspace together.

    Returns:
        A context that turns it off again.

    Raises:
        SettingsError: if an option is unknown or has an invalid value.
        BackendUnavailableError: if PyTorch has no NVIDIA GPU or is too old.
        PlanFileError: if the file of plans cannot be read, or is damaged.
    """
    return turn_on(open_interceptor(backend, options))


def turn_on(interceptor: AnyInterceptor) -> Enabled:
    """Send all convolutions of the process to an interceptor; `enable` and `python -m ucudnn.torch` make one each."""
    before = process_overrides.interceptor
    process_overrides.use(interceptor)
    report_at_exit(lambda: [summarize([interceptor])])
    return Enabled(interceptor, before)


def disable() -> None:
    """Give all convolutions back to PyTorch, except those of converted modules."""
    process_overrides.use(None)


def convert(module: torch.nn.Module, *, backend: str | None = None, **options: Any) -> torch.nn.Module:
    """Send the convolutions of one module and its children to a handle, which knows them by their module's name.

    A copy of the module uses the same handle. A module that was saved and loaded again uses none.

    Args:
        module: the module, whose convolutions get hooks.
        backend: as in `enable`.
        **options: as in `enable`.

    Returns:
        The module.

    Raises:
        SettingsError: if an option is unknown or has an invalid value.
        BackendUnavailableError: if PyTorch has no NVIDIA GPU or is too old.
    """
    interceptor = open_interceptor(backend, options)
    interceptor.names.give(module)
    process_overrides.add(interceptor)
    report_at_exit(lambda: [summarize([interceptor])])
    return module


def report(*, repeats: int = 0) -> Summary:
    """Return what went through handles since `enable` and in converted modules, and what was left to PyTorch and why.

    Args:
        repeats: how often each kernel's plan is timed now, on random operands; on GPUs, PyTorch's own kernel is timed
            beside it, and its memory measured. 0 reports only what was planned.
    """
    return summarize(_interceptors(), repeats=repeats)


def save_plans(path: str | PathLike[str]) -> None:
    """Write the plans of all handles so far, of `enable` and of converted modules, to a file.

    `enable(plans=path)` loads it, in this process or another one. Then the same convolutions are computed with the same
    calls.

    Raises:
        PlanFileError: if no convolution was planned yet, or the handles are of different devices.
        OutputError: if the file cannot be written.
    """
    save_handles([handle for each in _interceptors() for handle in each.handles().values()], path)


def _interceptors() -> list[AnyInterceptor]:
    current = process_overrides.interceptor
    return [*process_overrides.converted, *([current] if current else [])]
