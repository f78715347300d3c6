"""What a step takes on a device, from its profile.

An operation takes the longer of its arithmetic at the device's rate and its bytes at the device's bandwidth, and a
launch. A convolution has algorithms to choose from, each with a time and a workspace.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from operator import attrgetter

from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.errors import InvalidValueError, ProfileError
from ucudnn.memory.devices.convolution_methods import METHODS
from ucudnn.memory.devices.profile import DeviceProfile
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph, StepOperation
from ucudnn.memory.step.sharded import RankLink
from ucudnn.problem import ConvolutionProblem, DataType, MathMode
from ucudnn.profiles.format import load_profile
from ucudnn.profiles.measurement import Measurement
from ucudnn.solvers.desirable import desirable_set

CHOICES = ("fastest", "smallest")
"""Which algorithms convolutions take: the fastest ones, the papers' (p), or those of least workspace, their (m)."""

_WITHOUT_COPIES = {"tf32": 5, "float16": 15, "bfloat16": 15}
"""How much slower tensor cores compute channels that come first without copies of x and y in which they come last.

On an H200 the fastest algorithms of cuDNN 9.19 have a workspace of just these bytes for all three operations (medians
of 12 to 57 kernels each), and none where channels come last or kernels have one element.
"""


def device_costs(profile: DeviceProfile, graph: StepGraph, choice: str = "fastest") -> Costs:
    """Return the costs of a step on a device.

    Matrix products of float32 take TF32 where the step's condition 'matmul' says so, which the recorder takes from
    `torch.get_float32_matmul_precision`. Without it they do not, as is PyTorch's default.

    Raises:
        InvalidValueError: if there is no such choice.
        ProfileError: if the measured convolutions of the profile cannot be read, or it says nothing of a convolution.
    """
    if choice not in CHOICES:
        raise InvalidValueError(f"algorithms {choice!r} are not known: take {' or '.join(CHOICES)}")
    times, scratch = [], []
    math = graph.conditions.get("matmul", MathMode.FMA.value)  # PyTorch's default: TF32 for convolutions alone
    fronts = {problem: convolution_front(profile, problem) for problem in {*graph.problems.values()}}
    convolutions = {index: fronts[problem] for index, problem in graph.problems.items()}
    for index, operation in enumerate(graph.operations):
        front = convolutions.get(index)
        chosen = front[0 if choice == "smallest" else -1] if front else None
        times.append(chosen.time_ms if chosen else _time_ms(profile, operation, graph.batch, math))
        scratch.append(chosen.workspace_bytes if chosen else 0)
    return Costs(
        device=profile.name,
        time_ms=tuple(times),
        scratch_bytes=tuple(scratch),
        offload_bytes_per_ms=profile.to_host / 1e3,
        prefetch_bytes_per_ms=profile.from_host / 1e3,
        memory_bytes=profile.memory_bytes,
        contention=profile.contention,
        duplex=profile.duplex,
        granularity=profile.granularity,
        configurations=convolutions,
        modelled=True,
    )


def convolution_front(profile: DeviceProfile, problem: ConvolutionProblem) -> tuple[Configuration, ...]:
    """Return the desirable undivided configurations of a convolution on a device, in the order of workspace.

    Raises:
        ProfileError: if the measured convolutions of the profile cannot be read, or it says nothing of a convolution.
    """
    return desirable_set(_candidates(profile, problem), problem.batch)


def _candidates(profile: DeviceProfile, problem: ConvolutionProblem) -> list[MicroConfiguration]:
    found = _measured(profile.recorded, problem) if profile.recorded else []
    if found:
        return found
    shares = profile.convolution
    if {*shares} <= {*METHODS}:
        return [*_modelled(profile, problem)]
    layout = "last" if problem.layout.channels_last else "first"
    kind = arithmetic(problem.dtype.value, problem.math.value)
    share = shares.get(kind, {}).get(layout)
    if share is None:
        raise ProfileError(
            f"device {profile.name} has no share of the peak for convolutions of {kind}, channels {layout}"
        )
    flops = 2 * problem.multiplications / share
    is_copied = kind in _WITHOUT_COPIES and layout == "first" and max(problem.kernel) > 1 and problem.groups == 1
    if not is_copied:
        return [_configuration(profile, problem, "roofline", flops, 0, 0)]
    return [
        _configuration(profile, problem, "roofline", flops * _WITHOUT_COPIES[kind], 0, 0),
        _configuration(profile, problem, "copies", flops, 0, problem.x_bytes + problem.y_bytes),
    ]


def _modelled(profile: DeviceProfile, problem: ConvolutionProblem) -> Iterable[MicroConfiguration]:
    kinds = [problem.operation.value]
    if max(problem.kernel) == 1:
        kinds.insert(0, f"{problem.operation.value} 1x1")
    for name, shares in profile.convolution.items():
        share = next((shares[kind] for kind in kinds if kind in shares), None)
        work = METHODS[name](problem) if share else None
        if share and work:
            yield _configuration(profile, problem, name, work.flops / share, work.traffic, work.workspace_bytes)


def _configuration(
    profile: DeviceProfile, problem: ConvolutionProblem, name: str, flops: float, traffic: int, workspace: int
) -> MicroConfiguration:
    own = problem.x_bytes + problem.w_bytes + problem.y_bytes
    seconds = max(flops / profile.flops_per_second, own / profile.bytes_per_second) + traffic / profile.bytes_per_second
    return MicroConfiguration(
        size=problem.batch,
        algorithm=name,
        time_ms=seconds * 1e3 + profile.launch_ms,
        workspace_bytes=workspace,
    )


def _measured(recorded: str, problem: ConvolutionProblem) -> list[MicroConfiguration]:
    """Return what was measured of a problem, at its mini-batch or at the next one that was measured."""
    sizes = _recorded(recorded).get(_key(problem), {})
    if not sizes:
        return []
    nearest = min((size for size in sizes if size >= problem.batch), default=max(sizes))
    share = problem.batch / nearest
    return [
        MicroConfiguration(
            size=problem.batch,
            algorithm=each.algorithm.name,
            time_ms=each.time_ms * share,
            workspace_bytes=round(each.algorithm.workspace_bytes * share),
        )
        for each in sizes[nearest]
    ]


_Key = tuple[object, ...]
_OF_PROBLEM = attrgetter(
    *("operation", "channels", "spatial", "filters", "kernel", "paddings", "stride", "dilation", "groups"),
    *("layout", "math"),
)


@lru_cache(maxsize=4)
def _recorded(name: str) -> Mapping[_Key, Mapping[int, tuple[Measurement, ...]]]:
    """Return the measurements of a profile by problem and mini-batch; of several recordings the first one counts."""
    found: dict[_Key, dict[int, tuple[Measurement, ...]]] = defaultdict(dict)
    for recording in load_profile(name).recordings.values():
        for problem, measurements in recording.items():
            found[_key(problem)].setdefault(problem.batch, measurements)
    return found


def _key(problem: ConvolutionProblem) -> _Key:
    """Return what tells problems apart that differ in their time; strides are left out, float16 stands for bfloat16."""
    return (*_OF_PROBLEM(problem), DataType.FLOAT16 if problem.dtype.has_16_bits else problem.dtype)


def _time_ms(profile: DeviceProfile, operation: StepOperation, batch: int, math: str) -> float:
    flops, traffic = operation.flops.at(batch), operation.traffic.at(batch)
    seconds = traffic / profile.bytes_per_second
    if flops:
        share = profile.matrix.get(arithmetic(operation.dtype, math), profile.matrix["float32"])
        seconds = max(seconds, flops / (share * profile.flops_per_second))
    return seconds * 1e3 + profile.launch_ms


def arithmetic(dtype: str, math: str) -> str:
    """Return how a product of a type is computed: 'tf32' for float32 where that may be, else the type."""
    return MathMode.TF32.value if (dtype, math) == (DataType.FLOAT32.value, MathMode.TF32.value) else dtype


NVLINK_BYTES = {"h200": 450e9, "h100": 450e9, "a100-80": 300e9, "a100-40": 300e9, "v100": 150e9, "p100": 80e9}
"""Bytes per second in one direction of all NVLinks of a GPU, by NVIDIA's specifications."""


def link_between(ranks: int, costs: Costs, gigabytes: float | None = None, latency_ms: float | None = None) -> RankLink:
    """Return the link between ranks. What nobody states is the device's: NVLink, or else its link to the host.

    Each rank has a bandwidth of so many gigabytes (10^9 bytes) per second; between hosts, that of the slowest link.
    """
    known = NVLINK_BYTES.get(costs.device)
    own = costs.prefetch_bytes_per_ms if known is None else known / 1e3
    return RankLink(
        ranks=ranks,
        latency_ms=RankLink.latency_ms if latency_ms is None else latency_ms,
        bytes_per_ms=own if gigabytes is None else gigabytes * 1e6,
        source=f"assumed for {costs.device}" if gigabytes is None else "stated",
    )
