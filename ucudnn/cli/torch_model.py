"""PyTorch models in commands: run by `ucudnn time --torch`, recorded by `ucudnn memory`. PyTorch is loaded for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucudnn.benchmarking.parallel.interrupts import interrupts_later
from ucudnn.cli.options import MODEL_BATCH, variant_of
from ucudnn.errors import BackendUnavailableError, InvalidValueError
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.networks.variants import Variant
from ucudnn.problem import MOST_SIZE, DataType
from ucudnn.profiles.measurement import Effort
from ucudnn.reporting.terminal import progress, words_aside
from ucudnn.settings import Settings
from ucudnn.units import shortened

if TYPE_CHECKING:
    from ucudnn.memory.torch.comparison.trial_table import TrialTable
    from ucudnn.memory.torch.measuring.training_step import TrainingRecipe
    from ucudnn.torch.summary import Summary


def time_model(
    factory: str,
    shape: str,
    batch: int | None,
    variant: Variant,
    settings: Settings,
    effort: Effort,
    save_plans: Path | None = None,
) -> "Summary":
    """Run a PyTorch model forward and backward, and return its convolutions' plans and times.

    Args:
        factory: 'module:callable', which returns the model.
        shape: the shape of one sample, such as '3x224x224'.
        batch: mini-batch size, or None.
        variant: data type, math mode and layout.
        settings: how the convolutions are planned.
        effort: the time for one measurement; each plan is repeated as often as a measurement.
        save_plans: file to which the plans are written, or None.

    Raises:
        BackendUnavailableError: if PyTorch is not installed, or has no GPU.
        InvalidNetworkError: if there is no such model, or it does not take such an input.
    """
    try:
        with interrupts_later():
            from ucudnn.torch.model_timing import ModelStep, parse_shape, time_step
    except ImportError as error:
        raise _without_pytorch(error) from error
    step = ModelStep(factory=factory, shape=parse_shape(shape), batch=_checked(batch), variant=variant)
    with words_aside():
        return time_step(step, settings, effort=effort, repeats=effort.repeats, save_to=save_plans)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """How a model is trained, as the options of a command say.

    Attributes:
        model: 'module:callable', which returns the model.
        batch: mini-batch size, or None for 32.
        shape: the shape of one sample, such as '3x224x224'.
        tokens: whether the input is numbers of tokens.
        loss: name of the loss.
        optimizer: name of the optimizer.
        variant: data type, math mode and layout.
        autocast: type to which forward casts, or None.
        keep_gradients: whether gradients are set to zero rather than freed before a step.
    """

    model: str
    batch: int | None
    shape: str
    tokens: bool
    loss: str
    optimizer: str
    variant: Variant
    autocast: str | None
    keep_gradients: bool


def training_options(context: Any) -> TrainingOptions:
    """Return how a model is trained, from the options of a command's context."""
    given = context.params
    return TrainingOptions(
        model=given["model"] if "model" in given else given["step"],
        batch=given["batch"],
        shape=given["shape"],
        tokens=given["tokens"],
        loss=given["loss"],
        optimizer=given["optimizer"],
        variant=variant_of(given["dtype"], given["math"], given["layout"]),
        autocast=given["autocast"],
        keep_gradients=given.get("keep_gradients", False),
    )


def record_model(options: TrainingOptions, measure: str, tell: Callable[[str], None]) -> tuple[StepGraph, Costs | None]:
    """Return the training step of a model, and what was measured of it.

    Args:
        options: how it is trained.
        measure: the device on which it is measured, 'cuda' or 'cpu'; 'auto' for a GPU where there is one; 'none'.
        tell: a function that is called with what is about to be done.

    Raises:
        BackendUnavailableError: if PyTorch is not installed, or it has no such device.
        InvalidNetworkError: if there is no such model, or it does not take such an input.
        InvalidValueError: if there is no such loss or optimizer.
        MemoryError: if the step does not fit the device.
        StepGraphError: if the step is not affine in its mini-batch.
    """
    try:
        with interrupts_later():
            from ucudnn.memory.torch.record import measuring_device, record, record_measured
    except ImportError as error:
        raise _without_pytorch(error) from error
    recipe = _recipe_of(options)
    device = measuring_device(measure)
    with words_aside():
        if device is None:
            return record(recipe, progress=tell), None
        return record_measured(recipe, device, progress=tell)


def run_policies(
    options: TrainingOptions,
    policies: Sequence[str],
    budget: int | None,
    *,
    device: str,
    steps: int,
    capped: bool,
    convolutions: str,
) -> "TrialTable":
    """Train a model with policies, each in a process of its own, and show the progress.

    Args:
        options: how it is trained.
        policies: names of policies.
        budget: bytes for the whole step, or None.
        device: 'cuda', 'cpu', or 'auto' for a GPU where there is one.
        steps: steps that are timed.
        capped: whether PyTorch's allocator may take no more than the budget.
        convolutions: a batch-size policy by which plans choose how each convolution is computed; '' leaves them to
            PyTorch.

    Raises:
        BackendUnavailableError: if PyTorch is not installed, or it has no such device.
        InvalidNetworkError: if there is no such model.
        InvalidValueError: if there is no such loss, optimizer, policy or device.
    """
    try:
        with interrupts_later():
            from ucudnn.memory.torch.comparison.trial import trial_device
            from ucudnn.memory.torch.comparison.trial_result import TrialSettings
            from ucudnn.memory.torch.comparison.trial_table import compare_trials
            from ucudnn.memory.torch.measuring.training_step import check_recipe
    except ImportError as error:
        raise _without_pytorch(error) from error
    recipe = _recipe_of(options)
    with words_aside():
        check_recipe(recipe)  # before a process of each policy looks for what it names
    settings = TrialSettings(
        recipe=recipe,
        policy="",
        budget_bytes=budget,
        device=trial_device(device),
        steps=steps,
        capped=capped,
        convolutions=convolutions,
    )
    with progress("policies", len(policies)) as step:
        return compare_trials(settings, policies, step)


def _recipe_of(options: TrainingOptions) -> "TrainingRecipe":
    from ucudnn.memory.torch.measuring.training_step import TrainingRecipe
    from ucudnn.torch.model_timing import parse_shape

    return TrainingRecipe(
        model=options.model,
        batch=_checked(options.batch) or MODEL_BATCH,
        shape=parse_shape(options.shape, least=1),
        tokens=options.tokens,
        loss=options.loss,
        optimizer=options.optimizer,
        variant=options.variant,
        autocast=_autocast(options.autocast),
        gradients_kept=options.keep_gradients,
    )


def _autocast(name: str | None) -> DataType | None:
    """Return the type to which autocast casts.

    Raises:
        InvalidValueError: if it casts to no such type.
    """
    from ucudnn.memory.torch.measuring.training_step import AUTOCASTS

    found = None if name is None else next((each for each in AUTOCASTS if each.value == name.strip().lower()), None)
    if found is None and name is not None:
        allowed = " or ".join(each.value for each in AUTOCASTS)
        raise InvalidValueError(f"--autocast={shortened(name)} is not known: give {allowed}")
    return found


def _checked(batch: int | None) -> int | None:
    """Return a mini-batch size, if it is one.

    Raises:
        InvalidValueError: if it is not from 1 to the largest size of cuDNN.
    """
    if batch is not None and not 1 <= batch <= MOST_SIZE:
        raise InvalidValueError(f"--batch {shortened(batch)} is no mini-batch size: give 1 to {MOST_SIZE}")
    return batch


def _without_pytorch(error: ImportError) -> BackendUnavailableError:
    return BackendUnavailableError(f"PyTorch cannot be imported ({error}): `pip install 'ucudnn[torch]'` brings it")
