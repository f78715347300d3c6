"""`ucudnn memory`: commands for training within a memory budget."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, repeat
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import typer

from ucudnn.cli.help_text import CommandLine
from ucudnn.cli.memory_pictures import PictureOptions
from ucudnn.cli.memory_run import run_step
from ucudnn.cli.options import (
    DEFAULT_DEVICE,
    AlgorithmsOption,
    DeviceOption,
    JsonOption,
    ModelArgument,
    ModelBatchOption,
    PlotOption,
    StepArgument,
    StepBatchOption,
    StepOptions,
    budget_of,
    option,
    typed_options,
)
from ucudnn.cli.torch_model import record_model
from ucudnn.command_line import NoEffect
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import CHOICES, device_costs
from ucudnn.memory.policies.catalog import AUTO, POLICIES, named_policies
from ucudnn.memory.reports.comparison import compare_policies, policy_fronts
from ucudnn.memory.reports.explanation import PeakExplanation, explain
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.file import encode_step
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.step.shipped import open_measured_step
from ucudnn.plots import MemoryPicture, PolicyPoint, check_picture, draw_front, draw_memory
from ucudnn.reporting.output_file import check_output, write_whole
from ucudnn.reporting.terminal import print_table, print_text, progress
from ucudnn.units import csv_text, format_bytes, format_ms

_MODEL_OPTIONS = ("--shape", "--tokens", "--loss", "--optimizer", "--dtype", "--math", "--layout", "--autocast")
_RULES = (
    NoEffect(options=("--csv",), beside=("--json",)),
    NoEffect(options=(*_MODEL_OPTIONS, "--keep-gradients"), without=("a model, MODULE:CALLABLE",)),
    NoEffect(options=("--algorithms",), beside=("a measured step without --device",)),
    NoEffect(options=("--points",), without=("--front",)),
    NoEffect(options=("--budget", "--timeline", "--addresses", "--snapshot"), beside=("--front",)),
    NoEffect(options=("--pool",), without=("--addresses",)),
)

memory = CommandLine(
    name="memory",
    short_help="Plan a whole training step within a memory budget.",
    help="Plan a whole training step within a memory budget.\n\nFor example: ucudnn memory why resnet50 --batch 256",
    no_args_is_help=True,
)


@memory.command(short_help="Who owns the memory at a step's peak, and its floor.")
def why(
    context: typer.Context,
    *,
    step: StepArgument,
    batch: StepBatchOption = None,
    budget: Annotated[
        str | None, option("SIZE", "Look for mini-batches within this budget; default: the device's memory.")
    ] = None,
    device: DeviceOption = None,
    algorithms: AlgorithmsOption = CHOICES[0],
    options: StepOptions,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show who owns the memory at the peak of a step, its floor, and what would fit a budget.

    Steps that ship need neither PyTorch nor a GPU:

        ucudnn memory why resnet50 --batch 256 --plot resnet50.png

        ucudnn memory why gpt2 --budget 24GiB --device h200

    A model is recorded first, without a GPU:

        ucudnn memory why torchvision:resnet50 --shape 3x224x224 --batch 64
    """
    if plot is not None:
        check_picture(plot)
    limit = budget_of(budget)
    subject = _Subject.open(context, step, batch, device, algorithms, options)
    with _telling("explaining") as tell:
        found = explain(subject.graph, subject.costs, limit, progress=tell)
    if plot is not None:
        _draw(found, plot)
    if as_json:
        print_text(json.dumps(found.to_dict(), indent=2))
        return
    peak = found.liveness.peak_bytes
    for attribute, heading in (("operation", "by operation"), ("layer", "by layer"), ("source", "by source line")):
        rows = [
            [group.name, str(group.storages), format_bytes(group.size), f"{group.size / peak:.1%}"]
            for group in found.groups(attribute)
        ]
        if attribute != "operation":
            print_text("")
        print_table(
            found.title() if attribute == "operation" else "",
            [heading, "storages", "memory", "of the peak"],
            rows,
            found.lines() if attribute == "source" else (),
            text=(heading,),
            cut=heading,
        )


@memory.command("plan", short_help="What policies make of a step within a budget.")
def plan_step(
    context: typer.Context,
    *,
    step: StepArgument,
    batch: StepBatchOption = None,
    budget: Annotated[
        str | None, option("SIZE", "Memory for the whole step, such as 12GiB; default: the device's.")
    ] = None,
    policy: Annotated[
        str,
        option(
            "POLICIES",
            f"Policies, with commas between them, or the beginning of several, such as vdnn-ext: "
            f"{', '.join(POLICIES)}, or auto for the fastest of them; default: all but auto.",
            show_default=False,
            complete=(*POLICIES, AUTO),
        ),
    ] = ",".join(POLICIES),
    device: DeviceOption = None,
    algorithms: AlgorithmsOption = CHOICES[0],
    options: StepOptions,
    front: Annotated[
        bool, option(None, "Plan at budgets from the floor to the peak: time against peak.", "--front")
    ] = False,
    points: Annotated[int, option("N", "Budgets of --front.", min=2, max=1000)] = 12,
    pictures: PictureOptions,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, option(None, "Print CSV, one line for each plan.", "--csv")] = False,
) -> None:
    """Show what policies make of a step within a budget: time, peak, moved bytes, stalls and fragmentation.

    All policies within a budget, some of them on another device, and all of them at many budgets:

        ucudnn memory plan resnet50 --batch 256 --budget 12GiB --device h200

        ucudnn memory plan vgg16 --device titan-x --policy stock,checkpoint

        ucudnn memory plan unet3d --front --plot front.png

    What one policy moves and where its pool puts it, as pictures:

        ucudnn memory plan vgg16 --policy vdnn-all-p --timeline queues.png

        ucudnn memory plan vgg16 --policy vdnn-all-p --addresses pool.png
    """
    limit = budget_of(budget)
    names = named_policies(policy)
    pictures.check(names, [step, device or ""])
    subject = _Subject.open(context, step, batch, device, algorithms, options)
    if front:
        _show_front(subject, names, points, pictures.plot, as_json, as_csv)
        return
    costs = subject.costs(subject.graph)
    limit = costs.memory_bytes if limit is None else limit
    with _telling("planning", len(names)) as tell:
        found = compare_policies(subject.graph, costs, limit, names, tell)
    if (plan := found.rows[0].plan) is not None:
        pictures.draw(plan, costs)
    if pictures.plot is not None:
        dots = {
            row.policy: [PolicyPoint(row.simulation.peak_bytes, row.simulation.time_ms)]
            for row in found.rows
            if row.simulation is not None
        }
        draw_front(dots, pictures.plot, marks=_marks(found.floor_bytes, found.budget), title=found.title())
    if as_json:
        print_text(json.dumps(found.to_dict(), indent=2))
    elif as_csv:
        print_text(found.to_csv())
    else:
        print_table(found.title(), found.headings(), found.cells(), found.lines(), text=("policy",))


@memory.command("record", short_help="Record the step of a PyTorch model to a file.")
def record_step(
    *,
    model: ModelArgument,
    out: Annotated[Path, option("FILE", "File to write; .gz compresses.")],
    batch: ModelBatchOption = None,
    options: StepOptions,
    measure: Annotated[
        str,
        option("WHERE", "Where times and scratch are measured: cuda, cpu or none; auto: on the GPU if there is one."),
    ] = "auto",
) -> None:
    """Record the training step of a model in PyTorch: forward, loss, backward and the optimizer's step.

    Without a GPU nothing is computed, and times come from a device profile when the step is planned for. The sizes of
    the step hold for every mini-batch.

        ucudnn memory record torchvision:resnet50 --batch 256 --out r50.json

        ucudnn memory record my_models:gpt --shape 1024 --tokens --autocast bfloat16 --optimizer adam --out gpt.json

        ucudnn memory plan r50.json --batch 512 --budget 24GiB --device h200
    """
    check_output(out)
    with _telling("recording") as tell:
        graph, measured = record_model(model, batch, options, measure, tell)
    write_whole(out, encode_step(graph, measured, compress=out.suffix == ".gz"))
    what = f"{len(graph.operations)} operations and {len(graph.storages)} storages of {graph.name}"
    how = "" if measured is None else f", {format_ms(sum(measured.time_ms))} on {measured.device}"
    print_text(f"{what} at a mini-batch of {graph.batch}{how} are in {out}")


memory.command("run", short_help="Train a PyTorch model with policies, and compare them.")(run_step)


@dataclass(frozen=True, slots=True)
class _Subject:
    """What a command plans for.

    Attributes:
        graph: the step.
        measured: what was measured of it, where that counts.
        measured_batch: the mini-batch at which it was.
        device: name of the device profile that counts where nothing was measured.
        algorithms: which algorithms convolutions take on it.
    """

    graph: StepGraph
    measured: Costs | None
    measured_batch: int
    device: str
    algorithms: str

    @classmethod
    def open(
        cls,
        context: typer.Context,
        name: str,
        batch: int | None,
        device: str | None,
        algorithms: str,
        options: StepOptions,
    ) -> "_Subject":
        """Return what the options of a command say.

        Raises:
            UcudnnError: if there is no such step, model, device or mini-batch, or an option has no effect.
        """
        typed = typed_options(context)
        is_model = ":" in name and not _exists(name)
        present = {option: option for option in typed} | ({_RULES[1].without[0]: name} if is_model else {})
        for rule in _RULES:
            rule.refuse(typed, present)
        if device is not None:
            load_device(device)
        if is_model:
            with _telling("recording") as tell:
                graph, measured = record_model(name, batch, options, "none", tell)
        else:
            graph, measured = open_measured_step(name)
        if measured is not None and device is None:
            _RULES[2].refuse(typed, {_RULES[2].beside[0]: _RULES[2].beside[0]})
        else:
            measured = None
        sized = graph if batch is None else graph.with_batch(batch)
        return cls(sized, measured, graph.batch, device or DEFAULT_DEVICE, algorithms)

    def costs(self, graph: StepGraph) -> Costs:
        """Return the costs of the step at any mini-batch; measured ones grow with the mini-batch."""
        if self.measured is None:
            return device_costs(load_device(self.device), graph, self.algorithms)
        return self.measured.scaled(graph.batch / self.measured_batch)


@contextmanager
def _telling(title: str, total: int = 1) -> Iterator[Callable[[str], None]]:
    """Show what is going on; of several things each is done when the next one is told."""
    advances = chain([0], repeat(int(total > 1)))
    with progress(title, total) as step:
        yield lambda what: step(next(advances), what)


def _draw(found: PeakExplanation, path: Path) -> None:
    times, owners = found.over_time()
    picture = MemoryPicture(
        times_ms=times,
        staying=owners.staying,
        saved=owners.saved,
        rest=owners.rest,
        marks=_marks(found.liveness.floor_bytes, None),
        peak=found.peak_text(),
        phases=found.phases(),
    )
    draw_memory(picture, path, title=found.title())


def _marks(floor: int, budget: int | None) -> list[tuple[str, int]]:
    marks = [(f"floor {format_bytes(floor)}", floor)]
    return marks if budget is None else [*marks, (f"budget {format_bytes(budget)}", budget)]


def _show_front(
    subject: _Subject, names: Sequence[str], points: int, plot: Path | None, as_json: bool, as_csv: bool
) -> None:
    graph, costs = subject.graph, subject.costs(subject.graph)
    with _telling("planning", len(names) * (points + 1)) as tell:  # each policy without a budget, too
        fronts = policy_fronts(graph, costs, names, points, tell)
    title = f"{graph.name}, mini-batch {graph.batch}, on {costs.device}"
    if plot is not None:
        lines = {name: [PolicyPoint(each.peak_bytes, each.time_ms) for each in found] for name, found in fronts.items()}
        draw_front(lines, plot, marks=_marks(measure_liveness(graph, costs).floor_bytes, None), title=title)
    plans = [each for found in fronts.values() for each in found]
    if as_json:
        head = {"step": graph.name, "batch": graph.batch, "device": costs.device}
        print_text(json.dumps({**head, "plans": [asdict(each) for each in plans]}, indent=2))
    elif as_csv:
        columns = ("policy", "budget_bytes", "peak_bytes", "time_ms")
        print_text(csv_text(columns, map(attrgetter(*columns), plans)))
    else:
        rows = [
            [each.policy, format_bytes(each.budget_bytes), format_bytes(each.peak_bytes), format_ms(each.time_ms)]
            for each in plans
        ]
        print_table(title, ["policy", "budget", "peak", "time"], rows, text=("policy",))


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # a name that is too long, or one with a null character
        return False
