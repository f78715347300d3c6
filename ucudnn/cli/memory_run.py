"""`ucudnn memory run`: policies train a PyTorch model on this machine, and are compared."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ucudnn.cli.options import (
    JsonOption,
    ModelArgument,
    ModelBatchOption,
    ModelOptions,
    budget_of,
    option,
    typed_options,
)
from ucudnn.cli.torch_model import run_policies
from ucudnn.command_line import NoEffect
from ucudnn.errors import InvalidValueError
from ucudnn.memory.policies.catalog import AUTO, POLICIES
from ucudnn.plots import check_picture, draw_queues
from ucudnn.policy import BatchSizePolicy
from ucudnn.reporting.terminal import print_table, print_text
from ucudnn.settings import parse_choice

if TYPE_CHECKING:
    from ucudnn.memory.torch.comparison.trial_table import TrialTable

__all__ = ["run_step"]

_RULES = (
    NoEffect(options=("--cap",), beside=("--on cpu",)),
    NoEffect(options=("--cap",), without=("--budget",)),
    NoEffect(options=("--convolutions", "--timeline"), beside=("--policy pytorch",)),
)
_SIZES = [each.value for each in BatchSizePolicy]
_DEFAULT = "pytorch,vdnn-ext,swap-capped,dymem,checkpoint,auto"


def run_step(
    context: typer.Context,
    *,
    model: ModelArgument,
    batch: ModelBatchOption = None,
    budget: Annotated[str | None, option("SIZE", "Memory for the whole step, such as 8GiB; default: no bound.")] = None,
    policy: Annotated[
        str,
        option(
            "POLICIES",
            f"Policies, with commas between them: {', '.join(POLICIES)}, auto for the fastest of them, pytorch for"
            f" the step without a plan; vdnn and vdnn-ext stand for their dynamic ones; default:"
            f" {_DEFAULT.replace(',', ', ')}.",
            show_default=False,
            complete=(*POLICIES, AUTO, "pytorch", "vdnn", "vdnn-ext"),
        ),
    ] = _DEFAULT,
    on: Annotated[str, option("WHERE", "cuda or cpu; auto: the GPU if there is one.")] = "auto",
    steps: Annotated[int, option("N", "Steps that are timed.", min=1, max=10_000)] = 10,
    cap: Annotated[
        bool, option(None, "Let PyTorch's allocator take no more than the budget from the GPU.", "--cap")
    ] = False,
    convolutions: Annotated[
        str | None,
        option(
            "SIZES",
            "Let plans choose how each convolution is computed, in micro-batches of these sizes:"
            f" {', '.join(_SIZES)}; default: PyTorch chooses.",
            complete=_SIZES,
        ),
    ] = None,
    timeline: Annotated[
        Path | None, option("FILE", "Picture of one policy's step: queues and memory, predicted and measured.")
    ] = None,
    options: ModelOptions,
    as_json: JsonOption = False,
) -> None:
    """Train a model with policies, each in a process of its own, and compare time and peak with their predictions.

    The slowest policy stands first. A policy that does not fit is listed with its reason; if
    none ran, the exit status is 2.

        ucudnn memory run torchvision:resnet50 --batch 256 --budget 8GiB --policy vdnn-ext,dymem,checkpoint
    """
    typed = typed_options(context)
    present = [*typed, f"--on {on}", f"--policy {policy.strip()}"]
    for rule in _RULES:
        rule.refuse(typed, {each: each for each in present})
    limit = budget_of(budget)
    names = [name.strip() for name in policy.split(",")]
    if timeline is not None:
        check_picture(timeline)
        if len(names) != 1:
            raise InvalidValueError("--timeline draws the step of one policy: give it as --policy NAME")
    sizes = "" if convolutions is None else parse_choice(BatchSizePolicy, convolutions, "--convolutions").value
    found = run_policies(model, batch, options, names, limit, device=on, steps=steps, capped=cap, convolutions=sizes)
    try:
        _print(found, as_json)
    finally:  # the picture is drawn even if the output is closed
        if timeline is not None:
            _draw(found, timeline)
    if not found.cells():
        raise typer.Exit(2)


def _print(found: "TrialTable", as_json: bool) -> None:
    if as_json:
        print_text(json.dumps(found.to_dict(), indent=2))
    elif found.cells():
        print_table(found.title(), found.headings(), found.cells(), found.lines(), text=("policy",))
    else:
        print_text("\n".join([found.title(), *found.lines()]))


def _draw(found: "TrialTable", path: Path) -> None:
    """Draw the step of the only policy.

    Raises:
        InvalidValueError: if it has no plan, did not run, or its device cannot be seen.
    """
    (result,) = found.results
    if result.figures is None or result.figures.picture is None:
        why = result.reason or "there is no plan, or PyTorch's profiler does not see the device"
        raise InvalidValueError(f"--timeline has nothing to draw of {result.policy}: {why}")
    draw_queues(result.figures.picture, path, title=f"{found.title()}: {result.policy}")
