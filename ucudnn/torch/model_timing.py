"""Times the convolutions of a PyTorch model, forward and backward, for `ucudnn time --torch`."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb
from typing import Any, final

import torch

from ucudnn.errors import InvalidNetworkError, UcudnnError
from ucudnn.handle import save_plans
from ucudnn.networks.variants import Variant
from ucudnn.problem import MOST_SIZE, MathMode
from ucudnn.profiles.measurement import Effort
from ucudnn.settings import Settings
from ucudnn.torch.calls.problem import DTYPES
from ucudnn.torch.factory import interceptor_of
from ucudnn.torch.overrides import process_overrides
from ucudnn.torch.summary import Summary, summarize
from ucudnn.units import shortened

_CPU_ALLOCATOR = "DefaultCPUAllocator:"  # begins its messages, behind a place in PyTorch's source
_BATCHES = {"cuda": 32, "cpu": 2}  # NumPy's convolutions take seconds where a GPU's take milliseconds


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStep:
    """A model and its input, to run once forward and once backward.

    Attributes:
        factory: 'module:callable' that returns the model, such as 'torchvision:resnet50'.
        shape: shape of one sample, such as (3, 224, 224).
        batch: mini-batch size; None means 32 on a GPU and 2 on a CPU.
        variant: type and layout of parameters and input, and whether float32 may be multiplied as TF32.
    """

    factory: str
    shape: tuple[int, ...]
    batch: int | None = None
    variant: Variant = Variant()  # noqa: RUF009  # a frozen value may be shared


def parse_shape(text: str, least: int = 2) -> tuple[int, ...]:
    """Return the shape of one sample from '3x224x224', with at least 2 dimensions for a convolution, or 1 for vectors.

    Raises:
        InvalidNetworkError: if it cannot be read.
    """
    try:
        shape = tuple(int(part) for part in text.lower().replace(",", "x").split("x"))
    except ValueError as error:
        raise InvalidNetworkError(
            f"shape {shortened(text)} cannot be read: give channels and sizes, as 3x224x224"
        ) from error
    if not (1 <= min(shape) <= max(shape) <= MOST_SIZE and least <= len(shape) <= 4):
        raise InvalidNetworkError(f"shape {shortened(text)} is none of a sample: give channels and one to three sizes")
    return shape


def find_factory(name: str) -> Callable[[], torch.nn.Module]:
    """Return the callable that a text such as 'module:callable' names; 'torchvision:NAME' is in torchvision.models.

    Raises:
        InvalidNetworkError: if there is no such module or callable, or the module fails while it is imported.
    """
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise InvalidNetworkError(f"{name!r} names no model: give module:callable, such as torchvision:resnet50")
    if "" not in sys.path:
        sys.path.insert(0, "")  # so that modules of the current folder are found, as by `python -m`
    try:
        place: Any = import_module(module_name)
        package = hasattr(place, "__path__") and not hasattr(place, path.split(".")[0])
        if package and find_spec(f"{module_name}.models"):
            place = import_module(f"{module_name}.models")
        for part in path.split("."):
            place = getattr(place, part)
    except ImportError as error:
        raise InvalidNetworkError(f"{name!r}: {error}") from error
    except AttributeError as error:
        near = ", ".join(get_close_matches(path, dir(place)))
        raise InvalidNetworkError(f"{name!r}: {error}{f': did you mean {near}?' if near else ''}") from error
    except (Exception, SystemExit) as error:  # whatever a module's own lines raise: a torchvision of another PyTorch
        raise InvalidNetworkError(f"{name!r}: {module_name} cannot be imported: {_place_of(error)}") from error
    if not callable(place):
        raise InvalidNetworkError(f"{name!r} is a {type(place).__name__} and cannot be called")
    made: Callable[[], torch.nn.Module] = place
    return made


@contextmanager
def running(name: str, refusal: Callable[[Exception | SystemExit], str] | None = None) -> Iterator[None]:
    """Say in one line what the user's own code raised, and where, so that a command does not end in a traceback.

    Args:
        name: of the code, and of what needs its memory.
        refusal: says what is wrong, given the error; by default, that the code fails, and where.

    Raises:
        InvalidNetworkError: if the code raises anything but an error of ucudnn or a lack of memory.
        MemoryError: if a device or this machine has too little memory for it.
    """
    try:
        yield
    except (UcudnnError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        # PyTorch has no class for the error of a CPU's allocator.
        if isinstance(error, torch.OutOfMemoryError) or _CPU_ALLOCATOR in str(error):
            line = str(error).partition("\n")[0].partition(_CPU_ALLOCATOR)
            raise MemoryError(f"{name}: {(line[2] or line[0]).strip()}") from error
        said = f"{name} fails: {_place_of(error)}" if refusal is None else refusal(error)
        raise InvalidNetworkError(said) from error


def _place_of(error: BaseException) -> str:
    """Return the type of an error, the line of code that raised it, and the first line of its message."""
    frame = extract_tb(error.__traceback__)[-1]
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__} in {frame.filename}:{frame.lineno}: {line}"


def time_step(
    step: ModelStep, settings: Settings, *, effort: Effort, repeats: int, save_to: Path | None = None
) -> Summary:
    """Run a model forward and backward, and return the plans and times of its convolutions.

    Each plan, and on GPUs PyTorch's own kernel, is timed `repeats` times, of which the median counts. `effort` limits
    the time of one measurement of the benchmark. The plans are written to the file `save_to`, if there is one.

    Raises:
        InvalidNetworkError: if there is no such model, or it does not take such an input.
        BackendUnavailableError: if PyTorch has no NVIDIA GPU or is too old.
        MemoryError: if the model does not fit into memory.
    """
    make = find_factory(step.factory)
    interceptor = interceptor_of(settings, effort=effort)
    with running(step.factory):
        made = make()
    model, x = _placed(step, made, interceptor.device_type)
    interceptor.names.give(model)
    before, allowed = process_overrides.interceptor, torch.backends.cudnn.allow_tf32
    process_overrides.use(interceptor)
    torch.backends.cudnn.allow_tf32 = step.variant.math is MathMode.TF32
    try:
        _run(step.factory, model, x)
        if save_to is not None:
            save_plans(list(interceptor.handles().values()), save_to)
        return summarize([interceptor], repeats=repeats)
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
        process_overrides.use(before)


def _placed(step: ModelStep, model: object, device_type: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a model on a device with a random input, both of the step's type and layout."""
    if not isinstance(model, torch.nn.Module):
        raise InvalidNetworkError(f"{step.factory} returns a {type(model).__name__}, no torch.nn.Module")
    device, dtype = torch.device(device_type), DTYPES[step.variant.dtype]
    batch = _BATCHES[device_type] if step.batch is None else step.batch
    with running(step.factory):
        model = model.to(device=device, dtype=dtype)
    with running(f"an input of {'x'.join(map(str, (batch, *step.shape)))}"):
        x = torch.randn(batch, *step.shape, device=device, dtype=dtype)
    if step.variant.channels_last:
        form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
        untyped: Any = model  # the annotations of Module.to do not have this overload
        untyped.to(memory_format=form)  # in place
        x = x.to(memory_format=form)
    return model, x


def _run(name: str, model: torch.nn.Module, x: torch.Tensor) -> None:
    outputs = _tensors(called(name, model, x))
    if not outputs:
        raise InvalidNetworkError(f"{name} returns no tensor that a gradient could begin with")
    with running(name):
        loss: Any = sum(each.float().square().mean() for each in outputs)
        loss.backward()


def called(name: str, model: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    """Return what a model makes of an input.

    Raises:
        InvalidNetworkError: if it raises anything but an error of ucudnn or a lack of memory.
        MemoryError: if a device or this machine has too little memory for it.
    """

    def refusal(error: Exception | SystemExit) -> str:
        line = str(error).partition("\n")[0]
        return f"{name} does not take {'x'.join(map(str, x.shape))}: {line}"

    with running(f"{name} at a mini-batch of {len(x)}", refusal):
        return model(x)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors with a gradient in a model's output, which may nest tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [tensor for each in value for tensor in _tensors(each)]
    return []
