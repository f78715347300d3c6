"""Training steps of public libraries at small sizes, drawn with a fixed seed: what `bench.memory.coverage` trains.

No model is picked by hand. All that a library lists are shuffled, and the first ones whose plain step runs count. Of
each module of timm and torchvision it is the one with the fewest parameters of four. Arguments of models and of their
constructors are filled in by their names; what says how wide or deep a network is becomes small.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from bench.tools.results import ROOT, load

SEED, MOST_PARAMETERS = 67, 50_000_000
_TABLES = load(ROOT / "bench" / "data" / "small_models.json")
_FILLED: dict[str, Any] = _TABLES["others"] | {
    name: int(size) for size, names in _TABLES["sizes"].items() for name in names.split()
}
"""Arguments of constructors and values of configurations, by their names."""


class Case(NamedTuple):
    """A model, its arguments, and the loss of its output and the last argument; None where the output is the loss."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[..., Tensor] | None = None


Source = Iterator[tuple[str, Callable[[], Case]]]


def _drawn(names: Iterable[str]) -> list[str]:
    found = sorted(set(names))
    return Random(SEED).sample(found, len(found))


def _smallest(names: Iterable[str], make: Callable[[str], nn.Module]) -> str | None:
    """Return the one with the fewest parameters of four; None where all have too many."""
    sizes = {}
    for name in _drawn(names)[:4]:
        try:
            with torch.device("meta"):
                sizes[name] = sum(each.numel() for each in make(name).parameters())
        except Exception:  # noqa: BLE001  # constructors that look at values
            continue
    least = min(sizes, key=sizes.__getitem__, default="")
    return least if sizes.get(least, MOST_PARAMETERS + 1) <= MOST_PARAMETERS else None


def _names_of(call: Callable[..., Any], *, all_: bool) -> Iterator[str]:
    for name, each in inspect.signature(call).parameters.items():
        if each.kind is each.POSITIONAL_OR_KEYWORD and (all_ or each.default is each.empty):
            yield name


def _classified(make: Callable[..., nn.Module], size: int, *, batch: int = 2, frames: int = 0) -> Case:
    """Return the step of a classifier of images, of the small size if it takes that."""
    tries = [(64, {"img_size": 64}), (64, {}), (128, {}), (size, {})]
    for side, options in tries:
        try:
            model, x = make(**options), torch.randn(batch, 3, *[frames] * bool(frames), side, side)
            classes = model.train()(x)
        except Exception:  # noqa: BLE001  # the constructor has no such option, or the model takes its own size alone
            continue
        classes = classes if isinstance(classes, Tensor) else classes[0]
        target = torch.randint(classes.shape[-1], (batch,))
        loss = partial(_first_cross_entropy)
        return Case(make(**options), (x, target), {}, loss)
    raise ValueError("no size of images that this takes")


def _first_cross_entropy(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output if isinstance(output, Tensor) else output[0], target)


def timm_models() -> Source:
    """Yield a model of each module of timm."""
    import timm

    for module in _drawn(timm.list_modules()):
        if name := _smallest(timm.list_models(module=module), timm.create_model):
            size = timm.models.get_pretrained_cfg(name)
            size = 224 if size is None else size.input_size[-1]
            yield name, partial(_classified, partial(timm.create_model, name), size)


def torchvision_models() -> Source:
    """Yield a model of each module of torchvision."""
    from torchvision import models

    modules: dict[str, list[str]] = {}
    for name in models.list_models():
        module = models.get_model_builder(name).__module__.removeprefix("torchvision.models.")
        modules.setdefault(module, []).append(name)
    for module in _drawn(modules):
        own: dict[str, Any] = {"weights_backbone": None} if module.startswith(("segmentation", "detection")) else {}
        own |= {"min_size": 320, "max_size": 320} if module.startswith("detection") and "ssd" not in module else {}
        make = partial(models.get_model, weights=None, **own)
        if least := _smallest(modules[module], make):
            yield least, partial(_vision, partial(make, least), module.split(".")[0])


def _vision(make: Callable[..., nn.Module], kind: str) -> Case:
    image = torch.randn(2, 3, 64, 64)
    if kind == "optical_flow":
        return Case(make(), (torch.randn(1, 3, 128, 128), torch.randn(1, 3, 128, 128)), {"num_flow_updates": 2})
    if kind == "detection":
        boxes = torch.tensor([[4.0, 4.0, 40.0, 40.0], [10.0, 20.0, 60.0, 50.0]])
        targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])}]
        return Case(make(), ([image[0]], targets), {})
    if kind == "segmentation":
        return Case(make(), (image,), {})
    return _classified(make, 224, frames=16 * (kind == "video"))


def transformers_models(task: str = "") -> Source:
    """Yield architectures of transformers for a task."""
    import_module("transformers.modeling_layers")  # all models import it, which would take each process seconds
    modeling = import_module("transformers.models.auto.modeling_auto")
    auto = getattr(modeling, f"AutoModel{task}")
    for name in _drawn(auto._model_mapping._model_mapping):
        yield f"{name}{f' {task}' if task else ''}", partial(_transformer, auto, task, name)


def _transformer(auto: Any, task: str, name: str) -> Case:
    config = _shrunk(import_module("transformers").AutoConfig.for_model(name))
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    model = auto.from_config(config)
    wanted = {model.main_input_name, *_names_of(model.forward, all_=False)}
    wanted |= {"attention_mask"} if "input_ids" in wanted else set()  # as collators of a mini-batch give it
    given = {each: _argument(each, config) for each in wanted}
    side = given["pixel_values"].shape[-1] if "pixel_values" in given else 0
    labels = {
        **dict.fromkeys(("ForCausalLM", "ForMaskedLM", "ForSeq2SeqLM"), given.get("input_ids")),
        "ForSemanticSegmentation": torch.randint(2, (2, side, side)),
        "ForCTC": torch.randint(4, 20, (2, 4)),
        "": None,
    }.get(task, torch.randint(2, (2,)))
    return Case(model, (), given if labels is None else {**given, "labels": labels})


def _shrunk(config: Any) -> Any:
    for key, value in [*vars(config).items()]:
        if hasattr(value, "to_dict"):
            _shrunk(value)
        least = False if key == "use_cache" else 3 if key.endswith("token_id") else _FILLED.get(key)
        if isinstance(value, int) and isinstance(least, int) and value > least:
            setattr(config, key, least)
    return config


def _argument(name: str, config: Any = None) -> Any:
    """Return an argument of a forward by its name; names that are not known get None."""
    side, channels = (getattr(config, each, None) for each in ("image_size", "num_channels"))
    side = side if isinstance(side, int) else (side or [32])[-1]
    image = torch.randn(2, channels if isinstance(channels, int) else 3, side, side)
    tokens, sequence, edges = torch.randint(4, 100, (2, 16)), torch.randn(2, 16, 32), torch.randint(16, (2, 40))
    atoms = torch.randint(1, 10, (16,))
    return {
        **dict.fromkeys(("input_ids", "decoder_input_ids"), tokens),
        **dict.fromkeys(("attention_mask", "token_type_ids"), torch.ones_like(tokens)),
        **dict.fromkeys(("pixel_values", "x", "inputs", "input", "x_in", "images", "sample", "moving", "fixed"), image),
        **dict.fromkeys(("hidden_states", "encoder_hidden_states", "context"), sequence),
        **dict.fromkeys(("timestep", "timesteps"), torch.tensor([3, 7])),
        "input_values": torch.randn(2, 4000),
        "pooled_projections": torch.randn(2, 64),
        "pos": torch.rand(16, 3) * 4,
        "input_features": torch.randn(2, getattr(config, "num_mel_bins", 80), 100),
        "edge_index": edges,
        "z": atoms,
        "batch": torch.zeros_like(atoms),
        "edge_attr": torch.randn(40, 8),
        "class_labels": torch.tensor([1, 2]),
        "seg": torch.rand(2, 4, side, side),
    }.get(name)


def listed_models(module: str, among: str = "Module") -> Source:
    """Yield the classes of a module, the arguments of which are filled in by their names."""
    library = import_module(module)
    names = (name for name in dir(library) if name[:1].isupper() and "Pipeline" not in name)
    kinds: Iterator[Any] = (getattr(library, name, None) for name in names)
    found = {each.__name__: each for each in kinds if inspect.isclass(each) and issubclass(each, nn.Module)}
    for name in _drawn(found):
        if among in {each.__name__ for each in found[name].__mro__}:
            yield name, partial(_listed, found[name], graph="geometric" in module)


def _listed(kind: type[nn.Module], *, graph: bool) -> Case:
    """Return the step of a model with the arguments that its constructor needs, or else with all that are known."""
    fails = Exception()
    for all_ in (False, True) if graph or "monai" in kind.__module__ else (True,):
        try:
            model = kind(**{name: _FILLED[name] for name in _names_of(kind, all_=all_) if name in _FILLED})
            given = {name: _argument(name) for name in _names_of(model.forward, all_=False)}
            given |= {"x": torch.randn(16, 3)} if graph and "x" in given else {}
            model.train()(**given)
            return Case(model, (), given)
        except Exception as error:  # noqa: BLE001  # arguments that do not go together
            fails = error
    raise fails


def segmentation_models() -> Source:
    """Yield each architecture of segmentation_models_pytorch, with an encoder that is drawn."""
    smp = import_module("segmentation_models_pytorch")
    names = [name for name in smp.encoders.encoders if "resnet" in name or "efficient" in name or "mit" in name]
    for architecture, encoder in zip(_drawn(smp.MODEL_ARCHITECTURES_MAPPING), _drawn(names), strict=False):
        make = partial(smp.create_model, architecture, encoder, encoder_weights=None, classes=3)
        yield f"{architecture} {encoder}", partial(_segmented, make, smp.losses.DiceLoss("multiclass"))


def _segmented(make: Callable[[], nn.Module], loss: Callable[..., Tensor]) -> Case:
    return Case(make(), (torch.randn(2, 3, 64, 64), torch.randint(3, (2, 64, 64))), {}, loss)
