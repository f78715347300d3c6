"""`ucudnn memory`: commands for training within a memory budget."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from shlex import join, quote
from typing import Annotated

import typer

from ucudnn.cli.help_text import CommandLine, choices
from ucudnn.cli.memory_pictures import PictureOptions, draw_explained, marks_of
from ucudnn.cli.memory_run import run_step
from ucudnn.cli.options import (
    DEFAULT_DEVICE,
    DivideOption,
    JsonOption,
    ModelArgument,
    OutputOptions,
    PlanSecondsOption,
    PlotOption,
    RankOptions,
    RecordedOptions,
    StepOptions,
    budget_of,
    option,
    typed_options,
)
from ucudnn.cli.torch_model import divide_model, divider_of, fit_plans, is_factory, record_model
from ucudnn.command_line import NoEffect
from ucudnn.memory.devices.profile import load_device, smallest_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.devices.specification import specified_device
from ucudnn.memory.planner.search import PLAN_SECONDS
from ucudnn.memory.policies.catalog import AUTO, POLICIES, named_policies
from ucudnn.memory.reports.comparison import compare_policies, policy_fronts
from ucudnn.memory.reports.explanation import explain
from ucudnn.memory.reports.fits import largest_batches
from ucudnn.memory.reports.nnunet_plans import are_plans
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.file import encode_step
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.shipped import open_measured_step, shipped_steps
from ucudnn.plots import check_picture, draw_front
from ucudnn.reporting.output_file import check_output, write_whole
from ucudnn.reporting.terminal import print_json, print_table, print_text, progress
from ucudnn.units import format_bytes, format_ms, parse_bytes

_MODEL_OPTIONS = ("--shape", "--tokens", "--loss", "--optimizer", "--dtype", "--math", "--layout", "--autocast")
_RULES = (
    NoEffect(options=("--csv",), beside=("--json",)),
    NoEffect(options=(*_MODEL_OPTIONS, "--keep-gradients"), without=("a model, MODULE:CALLABLE",)),
    NoEffect(options=("--algorithms",), beside=("a measured step without --device",)),
    NoEffect(options=("--points",), without=("--front",)),
    NoEffect(options=("--budget", "--timeline", "--addresses", "--snapshot", "--plan-seconds"), beside=("--front",)),
    NoEffect(options=("--pool",), without=("--addresses",)),
    NoEffect(options=("--divide",), without=("a model, MODULE:CALLABLE",)),
    NoEffect(options=("--divide",), beside=("--ranks",)),
    NoEffect(options=("--link", "--latency"), without=("--ranks",)),
    NoEffect(options=("--write",), without=("a plans file of nnU-Net",)),
)

_StepArgument = Annotated[
    str,
    typer.Argument(
        metavar="STEP",
        help=f"{', '.join(shipped_steps())}, a file of `ucudnn memory record`, or a model in PyTorch, MODULE:CALLABLE.",
        autocompletion=choices(*shipped_steps()),
    ),
]

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
    step: _StepArgument,
    budget: Annotated[
        str | None,
        option(
            "SIZE", "Look for mini-batches within this budget, or share of the device's memory; default: all of it."
        ),
    ] = None,
    options: StepOptions,
    divide: DivideOption = False,
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
    graph, costs_of, limit = _opened(context, step, options, budget)
    with _telling("explaining") as tell:
        found = explain(graph, costs_of, limit, progress=tell)
        least = divide_model(step, options, costs_of, None, tell) if divide else None
    if plot is not None:
        draw_explained(found, plot)
    if as_json:
        divided = least and {"divided": {"floor_bytes": least.floor_bytes, "segments": least.program.divided}}
        print_json(found.to_dict() | (divided or {}))
        return
    told = [] if least is None else [f"floor divided: {format_bytes(least.floor_bytes)}", *least.program.divided]
    typed = {name: value for name, value in typed_options(context).items() if name not in ("--plot", "--json")}
    words = [str(typed.pop("STEP"))]
    for name, value in typed.items():
        words += [name] if value is True else [name, str(value)]
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
            [*found.lines(), *told, f"next: ucudnn memory plan {join(words)}"] if attribute == "source" else (),
            text=(heading,),
            cut=heading,
        )


@memory.command("plan", short_help="What policies make of a step within a budget.")
def plan_step(
    context: typer.Context,
    *,
    step: _StepArgument,
    budget: Annotated[
        str | None,
        option("SIZE", "Memory for the whole step, such as 12GiB, or 80% of the device's; default: all of it."),
    ] = None,
    policy: Annotated[
        str,
        option(
            "POLICIES",
            f"Policies, with commas between them, or the beginning of several, such as vdnn-ext: "
            f"{', '.join(POLICIES)}, auto for the fastest of them, or your own, MODULE:CLASS; default: all but auto.",
            show_default=False,
            complete=(*POLICIES, AUTO),
        ),
    ] = ",".join(POLICIES),
    options: StepOptions,
    front: Annotated[
        bool, option(None, "Plan at budgets from the floor to the peak: time against peak.", "--front")
    ] = False,
    points: Annotated[int, option("N", "Budgets of --front.", min=2, max=1000)] = 12,
    plan_seconds: PlanSecondsOption = PLAN_SECONDS,
    divide: DivideOption = False,
    among: RankOptions,
    pictures: PictureOptions,
    output: OutputOptions,
) -> None:
    """Show what policies make of a step within a budget: time, peak, moved bytes, stalls and fragmentation.

    All policies within a budget, some of them on another device, all of them at many budgets, and one on 64 GPUs:

        ucudnn memory plan resnet50 --batch 256 --budget 12GiB --device h200

        ucudnn memory plan vgg16 --device titan-x --policy stock,checkpoint

        ucudnn memory plan unet3d --front --plot front.png

        ucudnn memory plan gpt2 --policy auto --ranks 64 --link 50

    What one policy moves and where its pool puts it, as pictures:

        ucudnn memory plan vgg16 --policy vdnn-all-p --timeline queues.png

        ucudnn memory plan vgg16 --policy vdnn-all-p --addresses pool.png
    """
    names = named_policies(policy)
    if AUTO not in names:
        NoEffect(options=("--plan-seconds",), without=("--policy auto",)).refuse(typed_options(context), {})
    pictures.check(names, [step, options.device or ""])
    graph, costs_of, limit = _opened(context, step, options, budget)
    graph, costs, link = among.divided(graph, costs_of(graph))
    if front:
        with _telling("planning", len(names) * (points + 1)) as tell:  # each policy without a budget, too
            fronts = policy_fronts(graph, costs, names, points, tell)
            if divide:
                least = divide_model(step, options, costs_of, None, tell)
                others = policy_fronts(least.program.graph, least.costs, names, points, tell).plans
                own = (replace(each, policy=f"{each.policy}, divided") for each in others)
                fronts = replace(fronts, plans=(*fronts.plans, *own))
        if pictures.plot is not None:
            draw_front(fronts.points(), pictures.plot, marks=marks_of(fronts.floor_bytes, None), title=fronts.title())
        output.show(fronts, lambda: print_table(fronts.title(), *fronts.table(), text=("policy",)))
        return
    limit = costs.memory_bytes if limit is None else limit
    with _telling("planning", len(names)) as tell:
        parts = divide_model(step, options, costs_of, limit, tell) if divide else None
        planned = (graph, costs) if parts is None else (parts.program.graph, parts.costs)
        found = replace(compare_policies(*planned, limit, names, tell, plan_seconds), link=link)
        if parts is not None:
            found = replace(found, divided=parts.program.divided, undivided_ms=sum(costs.time_ms))
    pictures.draw(found.rows[0], costs)
    if pictures.plot is not None:
        dots = {row.policy: [(done.peak_bytes, done.time_ms)] for row, done in found.ranked()}
        draw_front(dots, pictures.plot, marks=marks_of(found.floor_bytes, found.budget), title=found.title())
    output.show(
        found, lambda: print_table(found.title(), found.headings(), found.cells(), found.lines(), text=("policy",))
    )


@memory.command("fits", short_help="The largest mini-batch that fits a GPU, and what it costs.")
def largest(
    context: typer.Context,
    *,
    step: _StepArgument,
    budget: Annotated[
        str | None,
        option("SIZE", "Memory for the whole process, such as 12GiB, or 80% of the device's; default: all of it."),
    ] = None,
    configuration: Annotated[
        str | None, option("NAME", "STEP is a plans file of nnU-Net v2: its configuration, such as 3d_fullres.")
    ] = None,
    write: Annotated[
        Path | None, option("FILE", "Plans file to write, with a configuration of the largest patch with fit.")
    ] = None,
    options: StepOptions,
    divide: DivideOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show the largest mini-batches of a step that fit a GPU: as the program is, and with `ucudnn.memory.fit`.

    A sample's time is in multiples of that of the program as it is:

        ucudnn memory fits resnet50 --gpu rtx-4090

        ucudnn memory fits my_models:net --gpu rtx-3060 --optimizer adamw --divide

    Of nnU-Net's plans, the largest patches too, whose time is that of a voxel:

        ucudnn memory fits nnUNetPlans.json --configuration 3d_fullres --gpu rtx-3090 --write largerPlans.json
    """
    if configuration is not None or are_plans(Path(step)):
        _RULES[1].refuse(typed_options(context), {})
        with _telling("looking") as tell:
            found = fit_plans(Path(step), configuration, options, budget, write, tell, divide=divide)
    else:
        graph, costs_of, limit = _opened(context, step, options, budget)
        with _telling("looking") as tell:
            divider = divider_of(step, options, costs_of, tell) if divide else None
            found = largest_batches(graph, costs_of, limit or costs_of(graph).memory_bytes, tell, divider)
    if as_json:
        print_json(found.to_dict())
    else:
        print_table(found.title(), *found.table(), found.lines(), text=("training", "policy"))


@memory.command("record", short_help="Record the step of a PyTorch model to a file.")
def record_step(
    *,
    model: ModelArgument,
    out: Annotated[Path, option("FILE", "File to write; .gz compresses.")],
    options: RecordedOptions,
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
        graph, measured = record_model(model, options, measure, tell)
    write_whole(out, encode_step(graph, measured, compress=out.suffix == ".gz"))
    what = f"{len(graph.operations)} operations and {len(graph.storages)} storages of {graph.name}"
    how = "" if measured is None else f", {format_ms(sum(measured.time_ms))} on {measured.device}"
    print_text(f"{what} at a mini-batch of {graph.batch}{how} are in {out}: ucudnn memory why {quote(str(out))}")


memory.command("run", short_help="Train a PyTorch model with policies, and compare them.")(run_step)


@memory.command("device", short_help="Write a device profile from the figures of a specification.")
def write_device(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the device in reports, such as my-gpu.")],
    memory_size: Annotated[str, option("SIZE", "Its memory, as programs have it, such as 23.65GiB.", "--memory")],
    flops: Annotated[float, option("TFLOPS", "Peak of float32 without tensor cores, in 10^12 operations per second.")],
    tensor_flops: Annotated[
        float | None,
        option("TFLOPS", "Peak of tensor cores for 16 bits, sums in float32, without sparsity; default: it has none."),
    ] = None,
    tf32_flops: Annotated[
        float | None, option("TFLOPS", "Their peak for TF32, without sparsity; default: half of that.")
    ] = None,
    bandwidth: Annotated[float, option("GB/S", "Bandwidth of its memory, in 10^9 bytes per second.")],
    link: Annotated[float, option("GB/S", "Copies from or to pinned memory: 12.5 for PCIe 3 x16, 25 for 4, 50 for 5.")],
    out: Annotated[Path | None, option("FILE", "File to write; default: NAME.json.")] = None,
) -> None:
    """Write a device profile from published figures, for a GPU that does not ship and is not at hand.

    Convolutions and matrix products are taken to reach the shares of a peak that common GPUs reach:

        ucudnn memory device rtx-4080 --memory 15.7GiB --flops 48.7 --tensor-flops 97.5 --tf32-flops 48.7
        --bandwidth 717 --link 25

        ucudnn memory plan resnet50 --batch 128 --device rtx-4080.json
    """
    path = Path(f"{name}.json") if out is None else out
    check_output(path)
    content = specified_device(
        name,
        memory_bytes=parse_bytes(memory_size),
        tflops=flops,
        tensor_tflops=tensor_flops,
        tf32_tflops=tf32_flops,
        bandwidth=bandwidth,
        link=link,
    )
    write_whole(path, f"{json.dumps(content, indent=1)}\n".encode())
    print_text(f"{name} is in {path}: ucudnn memory plan resnet50 --device {quote(str(path))}")


def _opened(
    context: typer.Context, name: str, options: StepOptions, budget: str | None
) -> tuple[StepGraph, Callable[[StepGraph], Costs], int | None]:
    """Return a step, what returns its costs at any mini-batch, and its budget; measured costs grow with the mini-batch.

    Without a device, a budget chooses the smallest one that ships and has it.

    Raises:
        UcudnnError: if there is no such step, model, device or mini-batch, or an option has no effect.
    """
    typed = typed_options(context)
    is_model = is_factory(name)
    present = {option: option for option in typed} | ({_RULES[1].without[0]: name} if is_model else {})
    for rule in _RULES:
        rule.refuse(typed, present)
    device = load_device(options.device or DEFAULT_DEVICE)
    opened = None if is_model else open_measured_step(name)
    measured = None if opened is None or options.device is not None else opened[1]
    limit = budget_of(budget, (device if measured is None else measured).memory_bytes)
    if limit is not None and options.device is None:
        device = smallest_device(limit) or device
    if opened is None:
        with _telling("recording") as tell:
            opened = record_model(name, options, "none", tell)
    graph = opened[0]
    if measured is not None:
        _RULES[2].refuse(typed, {_RULES[2].beside[0]: _RULES[2].beside[0]})
    batch, sized = graph.batch, graph if options.batch is None else graph.with_batch(options.batch)
    if measured is None:
        return sized, partial(device_costs, device, choice=options.algorithms), limit
    return sized, lambda each: measured.scaled(each.batch / batch), limit


@contextmanager
def _telling(title: str, total: int = 1) -> Iterator[Callable[[str], None]]:
    """Show what is going on; of several things each is done when the next one is told."""
    advances = chain([0], repeat(int(total > 1)))
    with progress(title, total) as step:
        yield lambda what: step(next(advances), what)
