"""PyTorch models in commands: run by `ucudnn time --torch`, recorded by `ucudnn memory`. PyTorch is loaded for them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ucudnn.benchmarking.parallel.interrupts import interrupts_later
from ucudnn.cli.options import (
    DEFAULT_DEVICE,
    MODEL_BATCH,
    SIZES,
    DivideOption,
    ModelOptions,
    PlanSecondsOption,
    RecordedOptions,
    StepOptions,
    budget_of,
    option,
)
from ucudnn.command_line import missing_module
from ucudnn.errors import BackendUnavailableError, InvalidNetworkError, InvalidValueError
from ucudnn.memory.devices.profile import load_device, smallest_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.planner.search import PLAN_SECONDS
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.networks.variants import Variant
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import MOST_SIZE, DataType
from ucudnn.profiles.measurement import Effort
from ucudnn.reporting.output_file import check_output, write_whole
from ucudnn.reporting.terminal import progress, words_aside
from ucudnn.settings import Settings, parse_choice
from ucudnn.units import shortened

if TYPE_CHECKING:
    from ucudnn.memory.reports.fits import LargestBatch, LargestBatches
    from ucudnn.memory.reports.nnunet_plans import Patch
    from ucudnn.memory.torch.comparison.trial_table import TrialTable
    from ucudnn.memory.torch.division.divisions import DividedStep
    from ucudnn.memory.torch.measuring.training_step import TrainingRecipe
    from ucudnn.memory.torch.subject.step_program import StepProgram
    from ucudnn.torch.summary import Summary


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """How policies train a model on this machine."""

    on: Annotated[str, option("WHERE", "cuda or cpu; auto: the GPU if there is one.")] = "auto"
    steps: Annotated[int, option("N", "Steps that are timed.", min=1, max=10_000)] = 10
    cap: Annotated[
        bool, option(None, "Let PyTorch's allocator take no more than the budget from the GPU.", "--cap")
    ] = False
    convolutions: Annotated[
        str | None,
        option(
            "SIZES",
            "Let plans choose how each convolution is computed, in micro-batches of these sizes:"
            f" {', '.join(SIZES)}; default: PyTorch chooses.",
            complete=SIZES,
        ),
    ] = None
    plan_seconds: PlanSecondsOption = PLAN_SECONDS
    divide: DivideOption = False
    compile: Annotated[
        bool, option(None, "Let PyTorch's Inductor compile what lies between heavy operations.", "--compile")
    ] = False


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

    Each plan is repeated as often as a measurement. The arguments are those of `ucudnn.torch.model_timing`.

    Raises:
        BackendUnavailableError: if PyTorch is not installed, or has no GPU.
        InvalidNetworkError: if there is no such model, or it does not take such an input.
    """
    _check_module(factory)
    with _loading():
        from ucudnn.torch.model_timing import ModelStep, parse_shape, time_step
    step = ModelStep(factory=factory, shape=parse_shape(shape), batch=_checked(batch), variant=variant)
    with words_aside():
        return time_step(step, settings, effort=effort, repeats=effort.repeats, save_to=save_plans)


def is_factory(name: str) -> bool:
    """Return whether a name is that of a model, MODULE:CALLABLE, and not of a file."""
    try:
        return ":" in name and not Path(name).exists()
    except (OSError, ValueError):  # a name that is too long, or one with a null character
        return True


def record_model(
    model: str, options: RecordedOptions, measure: str, tell: Callable[[str], None]
) -> tuple[StepGraph, Costs | None]:
    """Return the training step of a model, 'module:callable', and what was measured of it on a device.

    `measure` is 'cuda' or 'cpu'; 'auto' for a GPU where there is one; 'none'. `tell` hears what is about to be done.
    """
    _check_module(model)
    with _loading():
        from ucudnn.memory.torch.measuring.measure import asked_device
        from ucudnn.memory.torch.record import record, record_measured
    recipe = _recipe_of(model, options)
    device = asked_device("--measure", measure, "none")
    with words_aside():
        if device == "none" or (measure, device) == ("auto", "cpu"):
            return record(recipe, progress=tell), None
        return record_measured(recipe, device, progress=tell)


def divide_model(
    model: str,
    options: StepOptions,
    costs_of: Callable[[StepGraph], Costs],
    budget: int | None,
    tell: Callable[[str], None],
) -> "DividedStep":
    """Return the division of a model's step that keeps a budget in least time, or else that with the lowest floor."""
    with _loading():
        from ucudnn.memory.torch.division.divisions import lowest
        from ucudnn.memory.torch.record import record_program
    with words_aside():
        program = record_program(_recipe_of(model, options), progress=tell)
    costs = costs_of(program.graph)
    tell("dividing")
    return (None if budget is None else _best_division(program, costs, budget)) or lowest(program, costs)


def divider_of(
    model: str, options: StepOptions, costs_of: Callable[[StepGraph], Costs], tell: Callable[[str], None]
) -> "Callable[[int, int], LargestBatch | None]":
    """Return what plans within some bytes a mini-batch of a model whose segments run in parts."""
    with _loading():
        from ucudnn.memory.torch.record import record_program
    recipe = _recipe_of(model, options)

    def divide(budget: int, batch: int) -> "LargestBatch | None":
        with words_aside():
            program = record_program(replace(recipe, batch=batch), progress=tell)
        return _divided(program, costs_of, budget, tell)

    return divide


def _divided(
    program: "StepProgram", costs_of: Callable[[StepGraph], Costs], budget: int, tell: Callable[[str], None]
) -> "LargestBatch | None":
    from ucudnn.memory.reports.fits import LargestBatch

    graph = program.graph
    tell(f"dividing a mini-batch of {graph.batch}")
    found = _best_division(program, costs_of(graph), budget)
    if found is None:
        return None
    return LargestBatch(way="", batch=graph.batch, policy="joint", peak_bytes=found.peak_bytes, time_ms=found.step_ms)


def _best_division(program: "StepProgram", costs: Costs, budget: int) -> "DividedStep | None":
    """Return the division of a step that keeps a budget in least time; None where none keeps it."""
    from ucudnn.memory.planner.search import PlanSearch
    from ucudnn.memory.torch.division.divisions import divisions

    return next(iter(divisions(program, costs, budget, "joint", PlanSearch(None))), None)


def fit_plans(
    path: Path,
    configuration: str | None,
    options: StepOptions,
    budget: str | None,
    write: Path | None,
    tell: Callable[[str], None],
    *,
    divide: bool = False,
) -> "LargestBatches":
    """Return what a configuration of nnU-Net's plans can train within a budget, or within a device's memory.

    `write` is a plans file to write, which gets one more configuration, of the largest patch with `fit`. `divide` looks
    for what divided steps can train, too.

    Raises:
        BackendUnavailableError: if nnU-Net or PyTorch is not installed.
        InvalidNetworkError: if the file cannot be read, or makes no network.
    """
    from ucudnn.memory.reports.fits import chosen_patch, largest_patches  # they import policies
    from ucudnn.memory.reports.nnunet_plans import read_plans

    if write is not None:
        check_output(write)
    device = load_device(options.device or DEFAULT_DEVICE)
    limit = budget_of(budget, device.memory_bytes)
    if limit is not None and options.device is None:
        device = smallest_device(limit) or device
    plans = read_plans(path, configuration)
    plans = replace(plans, batch=_checked(options.batch) or plans.batch)
    if find_spec("nnunetv2") is None:
        raise BackendUnavailableError(
            f"{path} needs nnU-Net, which makes its network and loss: `pip install nnunetv2` brings it, with PyTorch"
        )
    costs_of = partial(device_costs, device, choice=options.algorithms)
    with words_aside():
        with _loading():
            from ucudnn.memory.torch.nnunet import plans_program, record_plans
        recorded = partial(record_plans, plans, progress=tell)

        def divided(patch: "Patch", budget: int, batch: int) -> "LargestBatch | None":
            return _divided(plans_program(plans, patch, batch, tell), costs_of, budget, tell)

        most = device.memory_bytes if limit is None else limit
        found = largest_patches(plans, recorded, costs_of, most, tell, divided if divide else None)
    if write is not None:
        chosen = chosen_patch(found)
        write_whole(write, plans.with_sizes(chosen.patch, chosen.batch))
    return found


def run_policies(
    model: str, options: ModelOptions, policies: Sequence[str], budget: str | None, trial: TrialOptions
) -> "TrialTable":
    """Train a model with policies, each in a process of its own and within a budget, and show the progress."""
    budget_of(budget, 1)  # a text that cannot be read is refused before PyTorch is loaded
    _check_module(model)
    given = trial.convolutions
    sizes = "" if given is None else parse_choice(BatchSizePolicy, given, "--convolutions").value
    with _loading():
        from ucudnn.memory.torch.comparison.trial_result import TrialSettings
        from ucudnn.memory.torch.comparison.trial_table import compare_trials
        from ucudnn.memory.torch.measuring.measure import asked_device, memory_bytes
        from ucudnn.memory.torch.measuring.training_step import check_recipe
    recipe = _recipe_of(model, options)
    with words_aside():
        check_recipe(recipe)  # before a process of each policy looks for what it names
    device = asked_device("--on", trial.on)
    settings = TrialSettings(
        recipe=recipe,
        policy="",
        budget=budget_of(budget, memory_bytes(device)),
        device=device,
        steps=trial.steps,
        capped=trial.cap,
        convolutions=sizes,
        plan_seconds=trial.plan_seconds,
        divide=trial.divide,
        compile=trial.compile,
    )
    with progress("policies", len(policies)) as step:
        return compare_trials(settings, policies, step)


def _check_module(model: str) -> None:
    """Refuse a model whose module does not exist before PyTorch is loaded, which takes seconds."""
    path, _, attribute = model.partition(":")
    if path.endswith(".py") or "/" in path:
        meant = path.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise InvalidNetworkError(f"{model}: give a module in place of a file: {meant}:{attribute}")
    name = model.partition(":")[0].partition(".")[0]
    if "" not in sys.path:
        sys.path.insert(0, "")
    if name.isidentifier() and ":" in model and name not in sys.modules and find_spec(name) is None:
        raise InvalidNetworkError(f"{model}: {missing_module(name)}")


def _recipe_of(model: str, options: ModelOptions) -> "TrainingRecipe":
    from ucudnn.memory.torch.measuring.training_step import TrainingRecipe
    from ucudnn.torch.model_timing import parse_shape

    return TrainingRecipe(
        model=model,
        batch=_checked(options.batch) or MODEL_BATCH,
        shape=parse_shape(options.shape, least=1),
        tokens=options.tokens,
        loss=options.loss,
        optimizer=options.optimizer,
        variant=options.computed.variant(),
        autocast=_autocast(options.autocast),
        gradients_kept=isinstance(options, RecordedOptions) and options.keep_gradients,
    )


def _autocast(name: str | None) -> DataType | None:
    """Return the type to which autocast casts, or raise an InvalidValueError if it casts to no such type."""
    from ucudnn.memory.torch.measuring.training_step import AUTOCASTS

    found = None if name is None else next((each for each in AUTOCASTS if each.value == name.strip().lower()), None)
    if found is None and name is not None:
        allowed = " or ".join(each.value for each in AUTOCASTS)
        raise InvalidValueError(f"--autocast={shortened(name)} is not known: give {allowed}")
    return found


def _checked(batch: int | None) -> int | None:
    """Return a mini-batch size, or raise an InvalidValueError if it is not from 1 to the largest size of cuDNN."""
    if batch is not None and not 1 <= batch <= MOST_SIZE:
        raise InvalidValueError(f"--batch {shortened(batch)} is no mini-batch size: give 1 to {MOST_SIZE}")
    return batch


@contextmanager
def _loading() -> Iterator[None]:
    """Let PyTorch be loaded, or raise a BackendUnavailableError; Ctrl-C waits until it is there."""
    try:
        with interrupts_later():
            yield
    except ImportError as error:
        raise BackendUnavailableError(
            f"PyTorch cannot be imported: {error.__cause__ or error}; pip install 'ucudnn[torch]' brings 2.10 or newer"
        ) from error
