"""What was tried in a program, what was adopted, and what that gained and cost."""

from collections import Counter
from dataclasses import asdict, dataclass
from statistics import median
from typing import final

from ucudnn.torch.trials.call_site import CallSite
from ucudnn.torch.tuning.tuner import Tuner
from ucudnn.units import format_bytes, format_ms


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TunedKernelReport:
    """One kernel that replaces PyTorch's own."""

    problem: str
    configuration: str
    parts: int
    layers: int
    calls: int
    time_ms: float
    baseline_ms: float
    workspace_bytes: int
    headroom_bytes: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TuningReport:
    """The course of tuning on one device.

    Attributes:
        device: 'cuda:0' or 'cpu'.
        phase: what is done now; see `TuningPhase`.
        kernels: the kernels that replace PyTorch's own.
        seen: number of kinds of kernels in the program.
        finished: how many of them are decided.
        outcomes: number of candidates by what became of them.
        step_ms: median time of the latest steps of PyTorch's own in which nothing was tried.
        gain: time of a step with these kernels over PyTorch's own, compared in turns; None if not compared.
        lost_seconds: time that trying has lost.
        elapsed_seconds: time since tuning was turned on.
        host_seconds: time that the program's own thread took between steps, by purpose; see `Tuner`.
        peak_bytes: the peak that a step may reach.
        host_bound: whether the host bounds the program, so that no faster kernel would help.
    """

    device: str
    phase: str
    kernels: tuple[TunedKernelReport, ...]
    seen: int
    finished: int
    outcomes: dict[str, int]
    step_ms: float
    gain: float | None
    lost_seconds: float
    elapsed_seconds: float
    host_seconds: dict[str, float]
    peak_bytes: int
    host_bound: bool

    @property
    def calls(self) -> int:
        """Number of calls of kernels that replace PyTorch's own."""
        return sum(each.calls for each in self.kernels)

    @property
    def divided(self) -> int:
        """Number of these calls that ran in more than one micro-batch."""
        return sum(each.calls for each in self.kernels if each.parts > 1)

    def to_dict(self) -> dict[str, object]:
        """Return the report as one JSON object."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report as lines of plain text."""
        compared = "" if self.gain is None else f", step {self.gain:.3f} of PyTorch's"
        found = [
            f"{self.device}: {self.phase}, {len(self.kernels)} of {self.seen} kinds of kernels replaced{compared}; lost"
            f" {self.lost_seconds:.2f} s of {self.elapsed_seconds:.1f} s"
        ]
        if self.host_bound:
            found.append("  the GPU waits for the host in each step, so a faster kernel would not make a step faster")
        for each in self.kernels:
            found.append(
                f"  {each.problem}: {each.configuration}, {format_ms(each.time_ms)} instead of"
                f" {format_ms(each.baseline_ms)}, workspace {format_bytes(each.workspace_bytes)}"
            )
        return found


def report_tuning(device: str, tuner: Tuner) -> TuningReport:
    """Return the report of one device."""
    sites = list(tuner.sites.values())
    outcomes = Counter(each.reason or each.state.value for site in sites for each in site.candidates or ())
    adopted = [site for site in sites if site.adopted is not None and site.problem in tuner.kernels]
    return TuningReport(
        device=device,
        phase=tuner.phase.value,
        kernels=tuple(_kernel(site, tuner) for site in adopted),
        seen=len(sites),
        finished=sum(site.finished for site in sites),
        outcomes=dict(outcomes),
        step_ms=tuner.step_ms,
        gain=tuner.gain,
        lost_seconds=tuner.ledger.lost_seconds,
        elapsed_seconds=tuner.ledger.elapsed_seconds,
        host_seconds=dict(tuner.host_seconds),
        peak_bytes=tuner.watch.peak_bytes,
        host_bound=tuner.host_check.is_bound,
    )


def _kernel(site: CallSite, tuner: Tuner) -> TunedKernelReport:
    kernel, chosen = tuner.kernels[site.problem], (site.adopted, site.undivided)  # while steps are compared, either
    runs = next(each for each in chosen if each is not None and each.configuration is kernel.configuration)
    return TunedKernelReport(
        problem=str(site.problem),
        configuration=str(runs.configuration),
        parts=len(runs.configuration.parts),
        layers=site.calls,
        calls=kernel.calls,
        time_ms=median(runs.samples_ms),
        baseline_ms=site.baseline_median_ms,
        workspace_bytes=kernel.workspace_bytes,
        headroom_bytes=int(site.headroom_bytes),
    )
