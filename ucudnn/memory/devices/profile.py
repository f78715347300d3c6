"""Device profiles: files that say how fast a device computes and copies, with the source of every figure.

A profile has

* `format` 'ucudnn-device', `version` 1, `name` and `title`;
* `memory_bytes`, and `granularity`, the bytes of which its allocator hands out multiples;
* `link`: bytes per second `to_host` and `from_host`, and `duplex` and `contention` as in Costs;
* `flops_per_second` and `bytes_per_second`: its peak and the bandwidth that kernels reach; `launch_ms` of a kernel;
* `matrix`: the share of the peak that matrix products reach, by arithmetic ('tf32' is float32 on tensor cores);
* `convolution`: the share of the peak that each algorithm reaches, by operation, and 'Forward 1x1' and the like for
  filters of one tap (see `convolution_methods`); or the share that convolutions reach by arithmetic and layout, where
  algorithms are not told apart;
* `recorded`: the profile of measured convolutions that counts before all that; null without one;
* `sources`: where each of these is from;
* `published`: times that others measured, of steps or convolutions. Those that calibrated the profile say so, the
  others test it.

`title`, `granularity`, `recorded`, `sources` and `published` may be left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from ucudnn.bounded import named_file, read_whole
from ucudnn.errors import InvalidValueError, ProfileError
from ucudnn.profiles.json_values import entries, load_json, number, refused, text, texts_by_name, whole

_FORMAT = "ucudnn-device"
_VERSION = 1
_SUFFIX = ".json"
_LEAST_SHARE = 1e-9  # of a peak or of a bandwidth
_GRANULARITY = 512  # of PyTorch's allocator on CUDA
_NEEDED = {
    "name": "the name by which it is asked for",
    "memory_bytes": "its memory in bytes",
    "link": "{to_host, from_host: bytes per second; duplex: share that each direction keeps while both copy;"
    " contention: how many times as long an operation takes beside a copy}",
    "flops_per_second": "its peak of float32",
    "bytes_per_second": "the bandwidth that kernels reach",
    "launch_ms": "the least time of a kernel",
    "matrix": "{float32, tf32, float16, ...: share of that peak that matrix products reach}",
    "convolution": "{float32, tf32, float16, ...: {first, last: share of that peak that convolutions reach}}",
}

Shares = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """What is known of a device: what the keys of its file say, those of `link` among them.

    Times are in milliseconds; rates are per second, as they are published.
    """

    name: str
    title: str
    memory_bytes: int
    granularity: int
    to_host: float
    from_host: float
    duplex: float
    contention: float
    flops_per_second: float
    bytes_per_second: float
    launch_ms: float
    matrix: Mapping[str, float]
    convolution: Shares
    recorded: str | None
    sources: Mapping[str, str]
    published: Sequence[Mapping[str, Any]]


def shipped_devices() -> tuple[str, ...]:
    """Return the names of the device profiles that ship with ucudnn."""
    files = (entry.name for entry in resources.files(__package__).iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in files if name.endswith(_SUFFIX)))


def smallest_device(memory_bytes: int) -> "DeviceProfile | None":
    """Return the shipped device of the least memory that has so many bytes, of several the fastest one."""
    devices = [load_device(name) for name in shipped_devices()]
    return min(
        (each for each in devices if each.memory_bytes >= memory_bytes),
        key=lambda each: (each.memory_bytes, -each.flops_per_second),
        default=None,
    )


@lru_cache(maxsize=32)
def load_device(name: str) -> DeviceProfile:
    """Read a device profile that ships with ucudnn ('h200'), or a file.

    Raises:
        ProfileError: if there is no such profile, or it cannot be read.
    """
    source = resources.files(__package__) / f"{name}{_SUFFIX}"
    if name not in shipped_devices():
        neither = f"a file nor one that ships with ucudnn: {', '.join(shipped_devices())}"
        source = named_file("device", name, ProfileError, neither)
    with refused(f"device {name!r}", ProfileError):
        content = load_json(read_whole(source))
        said = (content.get("format"), content.get("version")) if isinstance(content, dict) else ()
        if said != (_FORMAT, _VERSION):
            raise InvalidValueError(
                f"it has another format than {_FORMAT!r}, version {_VERSION}, which `ucudnn memory device` writes"
            )
        return _decode(content)


def _decode(content: dict[str, Any]) -> DeviceProfile:
    for key, meaning in _NEEDED.items():
        if key not in content:
            raise InvalidValueError(f"it has no {key}, which is {meaning}")
    link, recorded, matrix = content["link"], content.get("recorded"), _shares(content["matrix"], "matrix")
    if "float32" not in matrix:
        raise InvalidValueError("matrix has no float32, which stands for types that have no share of their own")
    return DeviceProfile(
        name=text(content["name"], "name"),
        title=text(content.get("title", content["name"]), "title"),
        memory_bytes=whole(content["memory_bytes"], "memory_bytes"),
        granularity=whole(content.get("granularity", _GRANULARITY), "granularity", least=1),
        to_host=number(link["to_host"], "to_host", least=1),
        from_host=number(link["from_host"], "from_host", least=1),
        duplex=number(link["duplex"], "duplex", least=_LEAST_SHARE, most=1),
        contention=number(link["contention"], "contention", least=1),
        flops_per_second=number(content["flops_per_second"], "flops_per_second", least=1),
        bytes_per_second=number(content["bytes_per_second"], "bytes_per_second", least=1),
        launch_ms=number(content["launch_ms"], "launch_ms"),
        matrix=matrix,
        convolution={name: _shares(shares, name) for name, shares in content["convolution"].items()},
        recorded=None if recorded is None else text(recorded, "recorded"),
        sources=texts_by_name(content.get("sources", {}), "source of"),
        published=tuple(entries(content.get("published", []), "published")),
    )


def _shares(value: Any, what: str) -> dict[str, float]:
    return {name: number(share, f"{what} {name}", least=_LEAST_SHARE) for name, share in dict(value).items()}
