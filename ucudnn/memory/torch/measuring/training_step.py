"""What is recorded: a model, an input, a loss and an optimizer, made from their names, and one step of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ucudnn.command_line import missing_module
from ucudnn.errors import InvalidNetworkError, InvalidValueError
from ucudnn.memory.step.graph import Phase
from ucudnn.memory.torch.tracing.provenance import Provenance
from ucudnn.memory.torch.tracing.step_effects import StepEffects
from ucudnn.memory.torch.tracing.trace_checks import explained
from ucudnn.memory.torch.tracing.tracer import Tracer
from ucudnn.networks.variants import Variant
from ucudnn.problem import DataType, MathMode
from ucudnn.torch.calls.problem import DTYPES
from ucudnn.torch.model_timing import called, find_factory, running

LOSSES: dict[str, Callable[..., Tensor]] = {"cross-entropy": nn.functional.cross_entropy, "mse": nn.functional.mse_loss}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer] | None] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-4),
    "adamw": partial(torch.optim.AdamW, lr=1e-4),
    "none": None,
}
AUTOCASTS = (DataType.FLOAT16, DataType.BFLOAT16)

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecipe:
    """A training step by names, as the command line gives it.

    Attributes:
        model: 'module:callable', which returns the model: 'torchvision:resnet50'.
        shape: of one sample of the input: (3, 224, 224).
        tokens: whether the input is token numbers (int64); else it is numbers of the variant's type.
        loss: one of LOSSES, or 'module:callable', which is called with the model's output and labels.
        variant: type and layout of parameters and input, and whether float32 may be multiplied as TF32.
        autocast: type to which `torch.autocast` casts in forward, one of AUTOCASTS, or None without it.
        gradients_kept: whether gradients are set to zero before a step rather than freed (`set_to_none=False`).

    Raises:
        InvalidValueError: if PyTorch's autocast has no such type; it would warn, and cast nothing.
    """

    model: str
    batch: int
    shape: tuple[int, ...] = (3, 224, 224)
    tokens: bool = False
    loss: str = "cross-entropy"
    optimizer: str = "sgd"
    variant: Variant = field(default_factory=Variant)
    autocast: DataType | None = None
    gradients_kept: bool = False

    def __post_init__(self) -> None:
        if self.autocast is not None and self.autocast not in AUTOCASTS:
            raise InvalidValueError(f"autocast casts to float16 or bfloat16 only, not to {self.autocast.value}")

    def conditions(self) -> dict[str, str]:
        """Return what a record depends on, as text."""
        found = {"shape": "x".join(map(str, self.shape)), "loss": self.loss, "optimizer": self.optimizer}
        found |= {"dtype": self.variant.dtype.value, "math": self.variant.math.value}
        found["layout"] = "last" if self.variant.channels_last else "first"
        exact = torch.get_float32_matmul_precision() == "highest"  # of products other than convolutions
        found["matmul"] = (MathMode.FMA if exact else MathMode.TF32).value
        return found | ({"autocast": self.autocast.value} if self.autocast else {})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """One training step that can run.

    The step frees the gradients before it begins, as `zero_grad()` does by default, so they exist from backward on,
    unless `gradients_kept` lets it set them to zero. The output of the model is not held while backward runs, unless
    `held` says so.

    Attributes:
        loss: returns the loss, a scalar, of the model's output and the targets, which are labels, as a rule.
        autocast: makes the context in which forward runs.
        held: returns what the loop holds of forward until the step ends, such as the model's output.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    loss: Callable[..., Tensor]
    targets: tuple[Any, ...] = ()
    optimizer: torch.optim.Optimizer | None = None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    gradients_kept: bool = False
    held: Callable[[], Sequence[Tensor]] = tuple

    def clear(self) -> None:
        """Free the gradients, unless they are kept."""
        if not self.gradients_kept:
            for parameter in self.model.parameters():
                parameter.grad = None

    def run(self, tracer: Tracer | None = None, watched: AbstractContextManager[Any] | None = None) -> Tensor:
        """Take one step, without the freeing of gradients, and return the loss; forward runs within `watched`."""
        if self.gradients_kept:
            self.model.zero_grad(set_to_none=False)
        with watched or nullcontext(), self.autocast():
            loss = self.loss(self.model(*self.inputs), *self.targets)
        with tracer.during(Phase.BACKWARD) if tracer is not None else nullcontext():
            loss.backward()
        if self.optimizer is not None:
            with tracer.during(Phase.OPTIMIZER) if tracer is not None else nullcontext():
                self.optimizer.step()
        return loss.detach()

    def with_batch(self, batch: int) -> "TrainingStep":
        """Return a step of the same model on a mini-batch of another size, all zeros."""

        def sized(tensor: Tensor) -> Tensor:
            made = tensor.new_zeros((batch, *tensor.shape[1:]))
            form = _FORMATS.get(tensor.dim())
            return made.contiguous(memory_format=form) if form and tensor.is_contiguous(memory_format=form) else made

        inputs, targets = tree_map_only(Tensor, sized, (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors of the optimizer's state with their names."""
        if self.optimizer is None:
            return
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield f"{names.get(id(parameter), 'parameter')}.{key}", value

    def input_tensors(self) -> list[Tensor]:
        """Return the tensors among the model's arguments and the targets."""
        return [leaf for leaf in tree_leaves((self.inputs, self.targets)) if isinstance(leaf, Tensor)]


@contextmanager
def refused_as_fitted(model: nn.Module) -> Iterator[None]:
    """Refuse what `fit` refuses of a forward on tensors without memory, with the same words.

    Raises:
        StepGraphError: if it reads values that change, or does what no plan does in its steps.
    """
    provenance = Provenance(model)
    tracer = Tracer(provenance)
    leaves = {id(tensor): name for name, tensor in chain(model.named_parameters(), model.named_buffers())}
    tracer.effects = StepEffects(
        provenance, leaves, {*map(id, model.modules())}, lambda _: None, lambda: None, seeks=False, settled=False
    )
    fakes = [each for each in model.buffers() if isinstance(each, FakeTensor)]
    known = {each: each.constant for each in fakes if each.constant is not None}
    for buffer, value in known.items():
        tracer.meet_values(buffer, value, changes=False)
        buffer.constant = None  # which PyTorch would read after a write, too
    try:
        with provenance.entered(), explained(tracer), tracer, tracer.effects.entered():
            yield
    finally:
        for buffer, value in known.items():
            buffer.constant = value


def check_recipe(recipe: TrainingRecipe) -> None:
    """Look for the model, the loss and the optimizer of a recipe, and make none of them; errors as in `make_step`."""
    find_model(recipe.model)
    _find_loss(recipe.loss)
    _check_optimizer(recipe.optimizer)


def make_step(recipe: TrainingRecipe, device: torch.device, *, foreach: bool | None = None) -> TrainingStep:
    """Return the step of a recipe on a device; inside a `FakeTensorMode` it takes no memory.

    `foreach` is whether the optimizer updates all parameters at once, as it does on GPUs; None is the device's way.

    Raises:
        InvalidNetworkError: if there is no such model, or it does not take such an input.
        InvalidValueError: if there is no such loss or optimizer.
    """
    model = _make_model(recipe, device)
    with running(f"an input of {'x'.join(map(str, (recipe.batch, *recipe.shape)))}"):
        x: Tensor
        if recipe.tokens:
            sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
            x = torch.randint(max(sizes, default=2), (recipe.batch, *recipe.shape), device=device)
        else:
            x = torch.randn((recipe.batch, *recipe.shape), device=device, dtype=DTYPES[recipe.variant.dtype])
            x = _converted(x, x.dtype, device, last=recipe.variant.channels_last)
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    if recipe.autocast is not None:
        autocast = partial(torch.autocast, device.type, DTYPES[recipe.autocast])
    is_fake = isinstance(x, FakeTensor)

    def refused(x: Tensor) -> Any:
        with refused_as_fitted(model):
            return model(x)

    with torch.no_grad(), autocast():
        output = _first(_called(recipe, refused if is_fake else model, x))
    loss, target = _make_loss(recipe.loss, output)
    _check_optimizer(recipe.optimizer)
    parameters, make = [each for each in model.parameters() if each.requires_grad], OPTIMIZERS[recipe.optimizer]
    if not parameters:
        raise InvalidNetworkError(f"{recipe.model} has no parameter that needs a gradient: there is nothing to train")
    return TrainingStep(
        model=model,
        inputs=(x,),
        loss=loss,
        targets=(target,),
        optimizer=make and make(parameters, foreach=foreach),
        autocast=autocast,
        gradients_kept=recipe.gradients_kept,
    )


def _make_model(recipe: TrainingRecipe, device: torch.device) -> nn.Module:
    make = find_model(recipe.model)
    if isinstance(make, nn.Module):
        raise InvalidNetworkError(f"{recipe.model} is a model that exists: name a function or a class that makes one")
    try:
        with suppress(ValueError):  # a builtin may not say what it takes
            signature(make).bind()
    except TypeError as error:
        raise InvalidNetworkError(
            f"{recipe.model}: {error}: name a function without arguments that makes the model"
        ) from error
    with running(recipe.model), device:
        model = make()
    if not isinstance(model, nn.Module):
        raise InvalidNetworkError(f"{recipe.model} returns a {type(model).__name__}, no torch.nn.Module")
    dtype, made = DTYPES[recipe.variant.dtype], dict[Tensor, nn.Parameter]()
    for module in model.modules():  # `Module.to` cannot convert fake tensors; parameters of several modules stay one
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in made:
                value = _converted(parameter.detach(), dtype, device, last=recipe.variant.channels_last)
                made[parameter] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            module._parameters[name] = None if parameter is None else made[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _converted(buffer, dtype, device, last=recipe.variant.channels_last)
    return model.train()


def find_model(name: str) -> Callable[..., Any]:
    """Return a callable by its name, 'module:callable', which makes a model or is a loss.

    Raises:
        InvalidNetworkError: if there is none of that name, or its package is not installed.
    """
    try:
        return find_factory(name)
    except InvalidNetworkError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and missing.name == name.partition(":")[0].partition(".")[0]:
            raise InvalidNetworkError(f"{name}: {missing_module(missing.name)}") from error
        raise


def _converted(value: Tensor, dtype: torch.dtype, device: torch.device, *, last: bool) -> Tensor:
    """Return a tensor on a device, in a type if it is of floating point, and with channels last where it has some."""
    form = _FORMATS.get(value.dim(), torch.contiguous_format) if last else torch.preserve_format
    return value.to(device, dtype if value.is_floating_point() else value.dtype, memory_format=form)


def _called(recipe: TrainingRecipe, model: Callable[[Tensor], Any], x: Tensor) -> Any:
    try:
        return called(recipe.model, model, x)
    except InvalidNetworkError as error:
        tokens = "leave out --tokens" if recipe.tokens else "--tokens for numbers of tokens"
        way_out = f"if it takes another input, give the shape of one sample as --shape, or {tokens}"
        raise InvalidNetworkError(f"{str(error).removesuffix('.')}: {way_out}") from error


def _first(output: Any) -> Tensor:
    found = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
    if found is None:
        raise InvalidNetworkError("the model returns no tensor of numbers that a loss could be computed of")
    return found


def _make_loss(name: str, output: Tensor) -> tuple[Callable[..., Tensor], Tensor]:
    own = _find_loss(name)
    if name == "mse":
        return own, torch.zeros_like(output)
    if output.dim() < 2:
        raise InvalidValueError(f"--loss={name!r}: the model's output of {output.dim()} dimensions has no classes")
    return own, torch.randint(output.shape[1], (output.shape[0], *output.shape[2:]), device=output.device)


def _find_loss(name: str) -> Callable[..., Tensor]:
    if ":" in name:
        return find_model(name)
    if name not in LOSSES:
        raise InvalidValueError(f"--loss={name!r} is not known: give {', '.join(LOSSES)} or module:callable")
    return lambda output, target: LOSSES[name](_first(output), target)


def _check_optimizer(name: str) -> None:
    if name not in OPTIMIZERS:
        raise InvalidValueError(f"--optimizer={name!r} is not known: give {', '.join(OPTIMIZERS)}")
