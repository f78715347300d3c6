"""`ucudnn memory run`: policies train a PyTorch model on this machine, and are compared."""

from pathlib import Path
from typing import Annotated

import typer

from ucudnn.cli.options import (
    JsonOption,
    ModelArgument,
    ModelOptions,
    option,
    typed_options,
)
from ucudnn.cli.torch_model import TrialOptions, run_policies
from ucudnn.command_line import NoEffect
from ucudnn.errors import InvalidValueError
from ucudnn.memory.policies.catalog import AUTO, POLICIES
from ucudnn.plots import check_picture, draw_queues
from ucudnn.reporting.terminal import print_json, print_table, print_text

__all__ = ["run_step"]

_RULES = (
    NoEffect(options=("--cap",), beside=("--on cpu",)),
    NoEffect(options=("--cap",), without=("--budget",)),
    NoEffect(
        options=("--convolutions", "--timeline", "--plan-seconds", "--divide", "--compile"),
        beside=("--policy pytorch",),
    ),
)
_DEFAULT = "pytorch,vdnn-ext,swap-capped,dymem,checkpoint,auto"


def run_step(
    context: typer.Context,
    *,
    model: ModelArgument,
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
    trial: TrialOptions,
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
    present = [*typed, f"--on {trial.on}", f"--policy {policy.strip()}"]
    for rule in _RULES:
        rule.refuse(typed, {each: each for each in present})
    names = [name.strip() for name in policy.split(",")]
    if timeline is not None:
        check_picture(timeline)
        if len(names) != 1:
            raise InvalidValueError("--timeline draws the step of one policy: give it as --policy NAME")
    found = run_policies(model, options, names, budget, trial)
    try:
        if as_json:
            print_json(found.to_dict())
        elif found.cells():
            print_table(found.title(), found.headings(), found.cells(), found.lines(), text=("policy",))
        else:
            print_text("\n".join([found.title(), *found.lines()]))
    finally:  # the picture is drawn even if the output is closed
        if timeline is not None:
            (result,) = found.results
            if result.figures is None or result.figures.picture is None:
                why = result.reason or "there is no plan, or PyTorch's profiler does not see the device"
                raise InvalidValueError(f"--timeline has nothing to draw of {result.policy}: {why}")
            draw_queues(result.figures.picture, timeline, title=f"{found.title()}: {result.policy}")
    if not found.cells():
        raise typer.Exit(2)
