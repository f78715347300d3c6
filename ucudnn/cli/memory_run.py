"""`ucudnn memory run`: policies train a PyTorch model on this machine, and are compared."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ucudnn.cli.help_text import choices
from ucudnn.cli.options import (
    AutocastOption,
    DtypeOption,
    JsonOption,
    LayoutOption,
    LossOption,
    MathOption,
    ModelArgument,
    ModelBatchOption,
    ModelShapeOption,
    OptimizerOption,
    TokensOption,
    budget_of,
    typed_options,
)
from ucudnn.cli.torch_model import run_policies, training_options
from ucudnn.command_line import NoEffect
from ucudnn.errors import InvalidValueError
from ucudnn.memory.policies.catalog import POLICIES
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
_DEFAULT = "pytorch,vdnn-ext,swap-capped,dymem,checkpoint,auto"


def run_step(
    context: typer.Context,
    model: ModelArgument,
    batch: ModelBatchOption = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory for the whole step, such as 8GiB; default: no bound."),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="POLICIES",
            help=f"Policies, with commas between them: {', '.join(POLICIES)}, auto for the fastest of them, pytorch for"
            f" the step without a plan; vdnn and vdnn-ext stand for their dynamic ones; default:"
            f" {_DEFAULT.replace(',', ', ')}.",
            show_default=False,
            autocompletion=choices(*POLICIES, "auto", "pytorch", "vdnn", "vdnn-ext"),
        ),
    ] = _DEFAULT,
    on: Annotated[
        str, typer.Option("--on", metavar="WHERE", help="cuda or cpu; auto: the GPU if there is one.")
    ] = "auto",
    steps: Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="Steps that are timed.")] = 10,
    cap: Annotated[
        bool, typer.Option("--cap", help="Let PyTorch's allocator take no more than the budget from the GPU.")
    ] = False,
    convolutions: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="Let plans choose how each convolution is computed, in micro-batches of these sizes:"
            f" {', '.join(each.value for each in BatchSizePolicy)}; default: PyTorch chooses.",
            autocompletion=choices(*(each.value for each in BatchSizePolicy)),
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Picture of one policy's step: queues and memory, predicted and measured."),
    ] = None,
    shape: ModelShapeOption = "3x224x224",
    tokens: TokensOption = False,
    loss: LossOption = "cross-entropy",
    optimizer: OptimizerOption = "sgd",
    dtype: DtypeOption = "float32",
    math: MathOption = "tf32",
    layout: LayoutOption = "first",
    autocast: AutocastOption = None,
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
    found = run_policies(
        training_options(context), names, limit, device=on, steps=steps, capped=cap, convolutions=sizes
    )
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
