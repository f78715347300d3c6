"""Recording: a network's convolutions, measured on this machine, as a profile."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ucudnn.benchmark import Benchmark
from ucudnn.errors import SettingsError
from ucudnn.exploration import Request
from ucudnn.networks import Network
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import MOST_ALIGNMENT, ConvolutionProblem, DataType, Layout, MathMode
from ucudnn.profile import Profile, Record
from ucudnn.settings import parse_choice

NO_LIMIT = 1 << 50
"""Bytes of workspace: limits filter when plans are made."""

_TELLING = {"NONDETERMINISTIC", "TENSOR_CORE", "DOWN_CONVERT_INPUTS"}  # notes that rule an algorithm out somewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """In which type, math mode and layout a network is recorded.

    Attributes:
        dtype: data type.
        math: whether float32 may be multiplied as TF32.
        channels_last: NHWC and its like, instead of NCHW.
    """

    dtype: DataType = DataType.FLOAT32
    math: MathMode = MathMode.TF32
    channels_last: bool = False

    def of(self, problem: ConvolutionProblem) -> ConvolutionProblem:
        """Return a problem in this variant."""
        layouts = (each for each in Layout if each.dimensions == len(problem.spatial))
        layout = next(each for each in layouts if each.channels_last is self.channels_last)
        return replace(problem, dtype=self.dtype, math=self.math, layout=layout)


def variants(dtypes: Sequence[str] | None, maths: Sequence[str] | None, layouts: Sequence[str] | None) -> list[Variant]:
    """Return all combinations of data types, math modes and layouts ('first' or 'last') that differ.

    Raises:
        SettingsError: if one of them is not known.
    """
    found: dict[Variant, None] = {}
    for dtype in [parse_choice(DataType, each, "--dtype") for each in dtypes or ["float32"]]:
        for math in [parse_choice(MathMode, each, "--math") for each in maths or ["tf32"]]:
            for layout in layouts or ["first"]:
                if layout not in ("first", "last"):
                    raise SettingsError(f"--layout={layout!r} is not known: give first or last")
                plain = math if dtype is DataType.FLOAT32 else MathMode.TF32  # other types know no difference
                found[Variant(dtype=dtype, math=plain, channels_last=layout == "last")] = None
    return list(found)


def record_requests(network: Network, wanted: Iterable[Variant], policy: BatchSizePolicy) -> list[Request]:
    """Return what to measure for a network's profile: the whole desirable set of every kernel."""
    problems = (variant.of(kernel.problem) for variant in wanted for kernel in network.kernels())
    return [
        Request(
            problem=problem,
            sizes=policy.sizes(problem.batch),
            limit_bytes=NO_LIMIT,
            adaptive=policy is BatchSizePolicy.ADAPTIVE,
        )
        for problem in dict.fromkeys(problems)
    ]


def record(name: str, requests: Sequence[Request], benchmark: Benchmark, *, every: bool = False) -> Profile:
    """Measure, and return a profile with one recording.

    Args:
        name: of the recording, and of the profile.
        requests: what to measure.
        benchmark: measures.
        every: keep also what another algorithm of the same API beats in both time and workspace at the same size.

    Raises:
        UnsupportedProblemError: if the backend cannot compute a problem at all.
    """
    benchmark.explore(requests)
    recording: dict[ConvolutionProblem, tuple[Record, ...]] = {}
    for request in requests:
        found: dict[ConvolutionProblem, list[Record]] = {}
        for part, result in benchmark.results(request):
            if result.measured and (result.complete or every):
                found.setdefault(replace(part, alignment=MOST_ALIGNMENT), []).append(result.record())
        recording.update({part: tuple(records if every else unbeaten(records)) for part, records in found.items()})
    return Profile(name=name, conditions=dict(benchmark.backend.machine()), recordings={name: recording})


def unbeaten(records: Sequence[Record]) -> list[Record]:
    """Return what no other record of the same API beats in both time and workspace.

    What repeats its results to the bit is compared with its like only, and so is what uses no tensor cores, for
    problems may ask for either.
    """
    kept: list[Record] = []
    for each in sorted(records, key=lambda record: (record.time_ms, record.workspace_bytes, record.algorithm)):
        faster = (other for other in kept if other.api == each.api and _TELLING & {*other.notes} <= {*each.notes})
        if all(other.workspace_bytes > each.workspace_bytes for other in faster):
            kept.append(each)
    return kept
