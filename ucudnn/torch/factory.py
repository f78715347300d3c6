"""Makes interceptors: wrong options are refused at once, and a device is opened when it is first used.

There are three kinds. One plans each kernel before its first run, from measurements. One lets PyTorch's own kernels run
first and tries others within the memory that they leave. One lets heuristic plans run within a stated limit, which are
made at once, and tries others within that limit.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ucudnn.backends.base import ComputeBackend
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.backends.cudnn.api.library import LIBRARY_NAME
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.benchmarking.measurer import ProgressListener
from ucudnn.benchmarking.storage.store import open_store
from ucudnn.errors import BackendUnavailableError, SettingsError
from ucudnn.handle import Handle
from ucudnn.planning.concurrency import groups_under
from ucudnn.planning.plan_file import read_plans
from ucudnn.profiles.measurement import Effort
from ucudnn.settings import VARIABLES, Settings, is_set, parse_choice, parse_size
from ucudnn.torch.calls.fallbacks import Fallbacks
from ucudnn.torch.calls.interceptor import Interceptor
from ucudnn.torch.device.gpu import TorchGpu, counted_bytes
from ucudnn.torch.device.memory_limit import MemoryLimit, StatedHeadroom
from ucudnn.torch.device.timed_device import TimedGpu
from ucudnn.torch.gate.gate_library import GateLibrary
from ucudnn.torch.overrides import AnyInterceptor, process_overrides
from ucudnn.torch.steps.trial_ledger import TrialLedger
from ucudnn.torch.trials.candidate_list import MOST_DIVIDED
from ucudnn.torch.trials.candidate_source import CandidateSource
from ucudnn.torch.tuning.auto_interceptor import AutoInterceptor
from ucudnn.torch.tuning.plan_owner import PlanOwner
from ucudnn.torch.tuning.tuner import Tuner

_LOG = logging.getLogger(__name__)
_NO_SETTINGS = ("groups", "effort", "listener")
_AUTO = "auto"
_OPTIONS_OF_AUTO = {"workspace_limit", "trial_share", "cudnn_library", "database"}
_VARIABLES_OF_AUTO = {"backend", "cudnn_library", "database"}  # by field of `Settings`
_TRIAL_SHARE = 0.05
_ON_GPUS = ("auto", "cudnn")
_FIRST, _PROGRAM = "first", "program"
_OPTIONS_OF_TUNING = ("tune", "memory_limit", "trial_share")
_MEASURING_SETTINGS = {"policy", "total_workspace_bytes", "benchmark_devices", "remeasure"}
_DIVIDED = 4  # candidates in micro-batches: within a stated limit they are the point


def open_interceptor(backend: str | None, options: Mapping[str, Any]) -> AnyInterceptor:
    """Return an interceptor with the given options: of handles, or one that tunes; see `tunes`.

    The backend and the options are those of `enable`. An interceptor that tunes takes only `cudnn_library`, `database`
    and `trial_share` of them.

    Raises:
        SettingsError: if an option is not known, or has an invalid value.
        BackendUnavailableError: as `interceptor_of`.
    """
    if tunes(backend, options):
        others = sorted(name for name in set(options) - _OPTIONS_OF_AUTO if options[name] is not None)
        if others:
            raise SettingsError(
                f"workspace_limit='auto' chooses kernels in the program: it takes no {', '.join(others)}"
            )
        chosen = {name: options.get(name) for name in ("cudnn_library", "database")}
        settings = Settings.load(backend=backend, **chosen)
        if settings.backend.partition(":")[0] not in _ON_GPUS:
            raise SettingsError(
                f"workspace_limit='auto' needs an NVIDIA GPU, and backend={settings.backend!r} has none"
            )
        return _tuned(settings, _share(options.get("trial_share")))
    apart = {*_NO_SETTINGS, *_OPTIONS_OF_TUNING}
    settings = Settings.load(backend=backend, **{name: value for name, value in options.items() if name not in apart})
    return stated_interceptor(settings, **{name: options[name] for name in apart if name in options})


def stated_interceptor(
    settings: Settings,
    *,
    tune: str | None = None,
    memory_limit: int | str | None = None,
    trial_share: float | None = None,
    **measuring: Any,
) -> AnyInterceptor:
    """Return an interceptor that keeps stated limits.

    Args:
        settings: the settings; every field counts.
        tune: 'first' measures kernels before their first run. 'program' makes heuristic plans at once, and tries others
            while the program runs. None is 'program' on GPUs, unless something is stated that only measurements before
            the first run obey: the total workspace, the policy, devices, an effort and the like.
        memory_limit: limit of live bytes and workspace together. The workspace limit is then as high if none is stated.
        trial_share: the largest part of the time that trials may lose, 0.05 by default.
        **measuring: `groups`, `effort` and `listener` of `interceptor_of`.

    Raises:
        SettingsError: if an option has an invalid value, or does not go with another one.
        PlanFileError, BackendUnavailableError: as `interceptor_of`.
    """
    share = _share(trial_share)
    limit_bytes = None if memory_limit is None else parse_size(memory_limit, "memory_limit")
    on_gpu = settings.backend.partition(":")[0] in _ON_GPUS
    if limit_bytes is not None:
        if not on_gpu:
            raise SettingsError(f"memory_limit needs an NVIDIA GPU, and backend={settings.backend!r} has none")
        if "workspace_limit_bytes" not in settings.names:
            settings = replace(settings, workspace_limit_bytes=limit_bytes)
    if tune not in (None, _FIRST, _PROGRAM):
        raise SettingsError(f"tune={tune!r} is not known: give one of {_FIRST}, {_PROGRAM}")
    asked = [settings.called(name) for name in _MEASURING_SETTINGS & set(settings.names)]
    asked = sorted(asked + [name for name, value in measuring.items() if value is not None])
    if tune == _PROGRAM and (asked or not on_gpu):
        what = f"takes no {', '.join(asked)}" if asked else f"needs an NVIDIA GPU, not backend={settings.backend!r}"
        raise SettingsError(f"tune={_PROGRAM!r} chooses kernels in the program: it {what}")
    if tune == _FIRST or asked or not on_gpu:
        return interceptor_of(settings, **measuring, memory_limit_bytes=limit_bytes)
    planned = interceptor_of(settings, memory_limit_bytes=limit_bytes, measures=False)
    return _tuned(settings, share, planned, limit_bytes)


def interceptor_of(
    settings: Settings,
    *,
    groups: Sequence[Sequence[str | Sequence[str]]] | None = None,
    effort: Effort | None = None,
    listener: ProgressListener | None = None,
    memory_limit_bytes: int | None = None,
    measures: bool = True,
) -> Interceptor:
    """Return an interceptor whose handles have the given settings; other arguments are as for `Handle.from_settings`.

    Nothing of CUDA is touched, because the program says which GPU a process uses. A memory limit bounds live bytes and
    workspace together on each GPU.

    Raises:
        SettingsError: if the backend does not execute, or a setting does not go with PyTorch.
        PlanFileError: if the file of plans cannot be read, or is damaged.
        BackendUnavailableError: if PyTorch has no NVIDIA GPU, or is too old.
    """
    groups_under(settings, groups)
    if settings.plans is not None:
        read_plans(settings.plans)  # a device looks into it at its first convolution, which is late for an error
    candidates = _candidates_of(settings)
    on_cpu = settings.backend == "cpu"
    aten = process_overrides.aten_kernels("cpu" if on_cpu else "cuda")
    total, limit = settings.total_workspace_bytes, settings.workspace_limit_bytes
    fallbacks = Fallbacks(limit if total is None else total, strict=settings.strict)
    open_with = partial(
        Handle.from_settings, settings, groups=groups, effort=effort, listener=listener, measures=measures
    )
    if on_cpu:
        return Interceptor(lambda _: open_with(backend=open_device(settings, -1)), "cpu", aten, fallbacks)
    if settings.benchmark_devices not in (None, "ranks"):
        raise SettingsError(
            f"{settings.called('benchmark_devices')}: GPUs of PyTorch measure alone, or together as 'ranks' of"
            " torch.distributed: leave it out, or give ranks"
        )
    _refuse_without_gpu()

    def open_handle(ordinal: int) -> Handle:
        memory = None if memory_limit_bytes is None else _memory_of(memory_limit_bytes, ordinal)
        return open_with(backend=_open_gpu(ordinal, candidates, settings.cudnn_library, memory))

    return Interceptor(open_handle, "cuda", aten, fallbacks)


def open_device(settings: Settings, ordinal: int) -> ComputeBackend:
    """Return the backend that computes on tensors of the CPU, for -1, or of the calling thread's current GPU.

    Raises:
        SettingsError: if the backend of the settings does not execute.
        BackendUnavailableError: if cuDNN cannot be loaded.
    """
    candidates = _candidates_of(settings)
    if ordinal < 0:
        return CpuBackend(threads=1)  # the threads of NumPy and of PyTorch would wait for each other's processors
    return _open_gpu(ordinal, candidates, settings.cudnn_library)


def _candidates_of(settings: Settings) -> Candidates:
    kind, _, target = settings.backend.partition(":")
    if kind == "replay":
        raise SettingsError(f"backend={settings.backend!r} plans but cannot execute: PyTorch needs auto, cudnn or cpu")
    # PyTorch chooses from the graph API, and its programs expect no more rounding than that has.
    return parse_choice(Candidates, target, "backend cudnn:") if target else Candidates.GRAPH


def tunes(backend: str | None, options: Mapping[str, Any]) -> bool:
    """Return whether a program is tuned while it runs, because its limit is 'auto' or it leaves all to the default.

    A limit of 'auto' is as much workspace as the peak of PyTorch's own steps leaves at each call. It is the default on
    GPUs. Who states anything else that belongs to planning before the first run, as an option or as a variable, means
    that: then the limit is the one that is stated, or 64 MiB. So it is on the CPU. An option of None counts as absent.
    """
    limit = options.get("workspace_limit")
    if limit is not None:
        return isinstance(limit, str) and limit.strip().lower() == _AUTO
    given = {name for name, value in options.items() if value is not None}
    if "trial_share" in given and not given & {"tune", "memory_limit"}:
        return True
    if given - _OPTIONS_OF_AUTO or any(is_set(name) for name in set(VARIABLES) - _VARIABLES_OF_AUTO):
        return False
    return Settings.load(backend=backend).backend.partition(":")[0] in _ON_GPUS


def _tuned(
    settings: Settings, share: float, planned: Interceptor | None = None, memory_limit_bytes: int | None = None
) -> AutoInterceptor:
    """Return an interceptor that tunes a program; without `planned`, PyTorch's own kernels run first."""
    candidates = _candidates_of(settings)
    _refuse_without_gpu()

    def open_tuner(ordinal: int) -> Tuner:
        def open_backend() -> ComputeBackend:
            if planned is not None and source.backend is None:  # the program's own one; those of threads only build
                backend = planned.handle(ordinal).backend
                if isinstance(backend, ComputeBackend):
                    return backend
            return _open_gpu(ordinal, candidates, settings.cudnn_library)

        store = partial(open_store, settings.database, in_program=True)
        divided = (MOST_DIVIDED, 0) if planned is None else (_DIVIDED, _DIVIDED)
        source = CandidateSource(open_backend, partial(torch.cuda.device, ordinal), store, *divided)
        if planned is None:
            return Tuner(TimedGpu(ordinal), source, TrialLedger(share))
        memory = None if memory_limit_bytes is None else _memory_of(memory_limit_bytes, ordinal)
        headroom = StatedHeadroom(settings.workspace_limit_bytes, memory)
        owner = PlanOwner(partial(planned.handle, ordinal), headroom)
        return Tuner(TimedGpu(ordinal), source, TrialLedger(share, planned=owner.planned_seconds), owner)

    aten = process_overrides.aten_kernels("cuda")
    return AutoInterceptor(open_tuner, "cuda", aten, process_overrides.refresh, GateLibrary(), planned)


def _share(share: object) -> float:
    share = _TRIAL_SHARE if share is None else share
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise SettingsError(f"trial_share={share!r} must be between 0 and 1")
    return float(share)


def _memory_of(limit_bytes: int, ordinal: int) -> MemoryLimit:
    return MemoryLimit(limit_bytes, partial(counted_bytes, ordinal))


def _refuse_without_gpu() -> None:
    if torch.version.cuda is None or not torch.cuda.device_count():
        raise BackendUnavailableError(
            f"PyTorch {torch.__version__} has no NVIDIA GPU: with backend='cpu', or UCUDNN_BACKEND=cpu, convolutions of"
            " CPU tensors are taken over instead, which is for tests"
        )


def _open_gpu(
    ordinal: int, candidates: Candidates, library_path: str | None, memory: MemoryLimit | None = None
) -> CudnnBackend:
    """Return cuDNN on a GPU of PyTorch: the library that PyTorch itself uses, unless the settings name another."""
    gpu = TorchGpu(ordinal, memory)
    own = torch.backends.cudnn.version()  # PyTorch loads its library to answer this
    try:
        # Given the bare name, the loader returns the library that the process has loaded already.
        backend = CudnnBackend(candidates=candidates, library_path=library_path or LIBRARY_NAME, device=gpu)
    except BackendUnavailableError:
        if library_path:
            raise
        backend = CudnnBackend(candidates=candidates, device=gpu)
    if own != backend.library.version:
        _LOG.warning("PyTorch runs on cuDNN %s, ucudnn on %s: %s", own, backend.library.version, backend.library.path)
    return backend
