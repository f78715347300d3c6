"""Plans files of nnU-Net v2: what a configuration trains, and the patches that its poolings allow.

A plans file has configurations, which inherit from each other. The data set's `dataset.json` lies beside it, as nnU-Net
puts it there, and says how many channels an image has, and which labels.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any, final

from ucudnn.bounded import read_whole
from ucudnn.errors import InvalidNetworkError, InvalidValueError
from ucudnn.profiles.json_values import UNREADABLE, entries, load_json, refused, text, texts, whole
from ucudnn.units import shortened

Patch = tuple[int, ...]

_CONFIGURATIONS = "configurations"
_LEAST_EDGE = 4  # of the smallest features, as nnU-Net's own planner has it
_MOST_EDGE = 1 << 16
_FITTED = "_fit"
_CLASSES = ("torch.nn.", "dynamic_network_architectures.")  # a file names no other code that is run


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NnunetPlans:
    """A configuration of a plans file, with its data set.

    Attributes:
        architecture: the network's class, its arguments, and which of these are names of classes.
        patch: edges of a patch, in voxels.
        median: edges of the median image, in voxels.
        steps: the multiples of which edges are: the products of the strides.
        batch_dice: whether Dice counts a mini-batch as one image.
        channels: of the network's input.
        outputs: of the network: labels or regions.
        regions: whether labels overlap.
        ignores: whether a label marks voxels that do not count.
    """

    path: Path
    configuration: str
    content: Mapping[str, Any]
    architecture: Mapping[str, Any]
    patch: Patch
    batch: int
    median: Patch
    steps: Patch
    batch_dice: bool
    channels: int
    outputs: int
    regions: bool
    ignores: bool

    def patches(self) -> list[Patch]:
        """Return the plan's patch among smaller and larger ones, each an axis and a step larger than the one before.

        As in nnU-Net's planner, the axis grows that covers least of the median image, and that shrinks first which
        covers most. The largest patch covers the median image. The smallest features keep four voxels.
        """
        found = [self.patch]
        for sign in (-1, 1):
            patch = self.patch
            while (axis := self._axis(patch, sign)) is not None:
                patch = (*patch[:axis], patch[axis] + sign * self.steps[axis], *patch[axis + 1 :])
                found.append(patch)
            found.sort(key=prod)
        return found

    def _axis(self, patch: Patch, sign: int) -> int | None:
        """Return the axis that grows (1) or shrinks (-1) next; None where none may."""
        covered = [edge / most for edge, most in zip(patch, self.median, strict=True)]
        small = [edge < (_LEAST_EDGE + 1) * step for edge, step in zip(patch, self.steps, strict=True)]
        axes = [axis for axis, share in enumerate(covered) if (share < 1 if sign > 0 else not small[axis])]
        return min(axes, key=lambda axis: sign * covered[axis], default=None)

    def with_sizes(self, patch: Patch, batch: int) -> bytes:
        """Return a plans file with one more configuration: it inherits from this one, and has another patch and batch.

        Its name is this one's with '_fit' behind it. It trains on the same preprocessed data.
        """
        added = {"inherits_from": self.configuration, "patch_size": list(patch), "batch_size": batch}
        every = {**self.content[_CONFIGURATIONS], f"{self.configuration.removesuffix(_FITTED)}{_FITTED}": added}
        return f"{json.dumps({**self.content, _CONFIGURATIONS: every}, indent=4)}\n".encode()


@final
@dataclass(frozen=True, slots=True)
class _Key:
    """A value of a file with its key, which errors name."""

    value: Any
    name: str

    def __getitem__(self, key: str) -> "_Key":
        if key not in self.entries():
            raise InvalidValueError(f"{self.name or 'the file'} has no key {key!r}")
        return _Key(self.value[key], f"{self.name}.{key}".removeprefix("."))

    def entries(self) -> dict[str, Any]:
        if not isinstance(self.value, dict) or not self.value:
            raise InvalidValueError(f"{self.name or 'the file'} {shortened(self.value)} is no object with entries")
        return self.value

    def edges(self, axes: int) -> Patch:
        """Return a whole number for each axis; the median of images may have a half."""
        given = [self.value] * axes if type(self.value) is int else [*entries(self.value, self.name)]
        if len(given) != axes:
            raise InvalidValueError(f"{self.name} {shortened(self.value)} has no {axes} entries")
        halves = (round(each) if type(each) is float and isfinite(each) else each for each in given)
        return tuple(whole(each, self.name, 1, _MOST_EDGE) for each in halves)

    def check_class(self, places: tuple[str, ...]) -> None:
        if not text(self.value, self.name).startswith(places):
            raise InvalidValueError(f"{self.name} {shortened(self.value)} is not known: give one of {places[0]}")


def are_plans(path: Path) -> bool:
    """Return whether a file holds plans of nnU-Net, whatever they say."""
    try:
        return path.suffix == ".json" and _CONFIGURATIONS in load_json(read_whole(path))
    except UNREADABLE:
        return False


def read_plans(path: Path, configuration: str | None) -> NnunetPlans:
    """Read a configuration of a plans file, and `dataset.json` beside it.

    Raises:
        InvalidNetworkError: if a file cannot be read, or there is no such configuration, or a key is missing or has a
            value that makes no sense; the message names the key.
    """
    content, beside = _read(path), path.with_name("dataset.json")
    if not beside.exists():
        raise InvalidNetworkError(f"{beside} is not there: put the data set's own beside the plans")
    data_set = _read(beside)
    with refused(str(path), InvalidNetworkError):
        every = content[_CONFIGURATIONS]
        if configuration is None or configuration not in every.entries():
            asked = "" if configuration is None else f"configuration {shortened(configuration)} is not there: "
            raise InvalidValueError(f"{asked}give --configuration {', '.join(every.entries())}")
        own = _inherited(every, configuration)
        axes = len([*entries(own["patch_size"].value, own["patch_size"].name)])
        whole(axes, f"{own['patch_size'].name}: number of edges", 2, 3)
        arguments, imports = own["architecture"]["arch_kwargs"], own["architecture"]["_kw_requires_import"]
        own["architecture"]["network_class_name"].check_class(_CLASSES[1:])
        for key in texts(imports.value, imports.name):
            if arguments[key].value is not None:
                arguments[key].check_class(_CLASSES)
        strides = arguments["strides"]
        each = [_Key(stride, strides.name).edges(axes) for stride in entries(strides.value, strides.name)]
        patch, steps = own["patch_size"].edges(axes), tuple(map(prod, zip((1,) * axes, *each, strict=True)))
        if any(edge % step for edge, step in zip(patch, steps, strict=True)):
            raise InvalidValueError(
                f"{own['patch_size'].name} {list(patch)} is no multiple of the strides, {list(steps)}"
            )
        found: dict[str, Any] = {
            "architecture": own["architecture"].value,
            "batch": own["batch_size"].edges(1)[0],
            "median": own["median_image_size_in_voxels"].edges(axes),
            "batch_dice": own.entries().get("batch_dice") is True,
        }
    with refused(str(beside), InvalidNetworkError):
        found |= _data_set(data_set, cascaded=own.entries().get("previous_stage") is not None)
    return NnunetPlans(
        path=path,
        configuration=configuration,
        content=content.value,
        patch=patch,
        steps=steps,
        **found,
    )


def _read(path: Path) -> _Key:
    with refused(str(path), InvalidNetworkError):
        return _Key(load_json(read_whole(path)), "")


def _inherited(every: _Key, name: str) -> _Key:
    found, chain = dict[str, Any](), list[Any]([name])
    while (parent := chain[-1]) is not None:
        own = every[text(parent, f"{every[name].name}.inherits_from")].entries()
        found = {**own, **found}
        chain.append(own.get("inherits_from"))
        if chain[-1] in chain[:-1]:
            raise InvalidValueError(f"{every[parent].name}.inherits_from {chain[-1]!r} goes round in a circle")
    return _Key(found, every[name].name)


def _data_set(content: _Key, *, cascaded: bool) -> dict[str, Any]:
    """Return what the data set says: a cascade gives the network a channel for each label of the stage before."""
    names = content["modality" if "modality" in content.entries() else "channel_names"].entries()
    labels = content["labels"].entries()
    known = {
        name: {whole(each, f"labels.{name}", 0, _MOST_EDGE) for each in (value if isinstance(value, list) else [value])}
        for name, value in labels.items()
        if name != "ignore"
    }
    regions = any(isinstance(value, list) and len(value) > 1 for value in labels.values())
    foreground = {each for value in known.values() for each in value} - {0}
    return {
        "channels": len(names) + cascaded * len(foreground),
        "outputs": sum(value != {0} for value in known.values()) if regions else len(foreground) + 1,
        "regions": regions,
        "ignores": "ignore" in labels,
    }
