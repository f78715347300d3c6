"""Options that several commands share, the cases in which one has no effect, and what a command line makes of them."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ucudnn.backends.candidates import Candidates
from ucudnn.cli.help_text import choices
from ucudnn.command_line import NoEffect, read_settings
from ucudnn.errors import InvalidSizeError
from ucudnn.memory.devices.profile import shipped_devices
from ucudnn.memory.devices.roofline import CHOICES
from ucudnn.memory.step.shipped import shipped_steps
from ucudnn.networks.tables import CSV_HEADER, NETWORKS
from ucudnn.networks.variants import LAYOUT_NAMES, Variant, variants
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import DataType, MathMode
from ucudnn.profiles.format import shipped_profiles
from ucudnn.settings import Settings, SolverName, parse_choice
from ucudnn.units import parse_bytes

_COLUMNS = ", ".join(CSV_HEADER.split(","))
NETWORK_HELP = f"{', '.join(NETWORKS)}, or a CSV file of layers with these columns in its first line: {_COLUMNS}."
COMPLETE_NETWORK = choices(*NETWORKS)
NetworkArgument = Annotated[str, typer.Argument(metavar="NETWORK", help=NETWORK_HELP, autocompletion=COMPLETE_NETWORK)]
COMPLETE_POLICY = choices(*(each.value for each in BatchSizePolicy))
_COMPLETE_DTYPE = choices(*(each.value for each in DataType))
_COMPLETE_MATH = choices(*(each.value for each in MathMode))
_COMPLETE_LAYOUT = choices(*LAYOUT_NAMES)
MODEL_BATCH = 32  # of a PyTorch model, unless --batch gives another
BatchOption = Annotated[
    int | None,
    typer.Option(
        "--batch",
        metavar="N",
        help="Mini-batch size; default: that of the network or the profile, or 16 where NumPy computes it.",
    ),
]
StepBatchOption = Annotated[
    int | None,
    typer.Option(
        "--batch",
        metavar="N",
        help=f"Mini-batch size; default: that of the recorded step, {MODEL_BATCH} for a model.",
    ),
]
ModelBatchOption = Annotated[
    int | None, typer.Option("--batch", metavar="N", help=f"Mini-batch size; default: {MODEL_BATCH}.")
]
WorkspaceOption = Annotated[
    str | None,
    typer.Option(
        "--workspace",
        "--workspace-limit",
        metavar="SIZE",
        help="WR: limit for each kernel, such as 64MiB [UCUDNN_DEFAULT_WORKSPACE_LIMIT].",
    ),
]
TotalOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="WD: total that is divided among all kernels, such as 120MiB [UCUDNN_TOTAL_WORKSPACE_SIZE].",
    ),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        metavar="POLICY",
        help="Micro-batch sizes to try: undivided, powerOfTwo, all or adaptive [UCUDNN_BATCH_SIZE_POLICY].",
        autocompletion=COMPLETE_POLICY,
    ),
]
BackendOption = Annotated[
    str | None,
    typer.Option(
        metavar="BACKEND",
        help="auto, cpu, cudnn or replay:NAME-or-path [UCUDNN_BACKEND].",
        autocompletion=choices("auto", "cpu", "cudnn", *(f"replay:{name}" for name in shipped_profiles())),
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        metavar="PROFILE",
        help="A recorded profile, 'h200' or a file; the same as --backend replay:PROFILE.",
        autocompletion=choices(*shipped_profiles()),
    ),
]
CandidatesOption = Annotated[
    str | None,
    typer.Option(
        metavar="API",
        help="cuDNN algorithms to choose from: best (default), graph, legacy, legacy-fma (without TF32) or every;"
        " best-plain and graph-plain are best and graph without the algorithms that copy the strided part of x first.",
        autocompletion=choices(*(each.value for each in Candidates)),
    ),
]
SolverOption = Annotated[
    str | None,
    typer.Option(
        metavar="SOLVER",
        help="WD's solver: auto, highs, cbc, glpk, gurobi or cplex [UCUDNN_SOLVER].",
        autocompletion=choices(*(each.value for each in SolverName)),
    ),
]
TimeLimitOption = Annotated[
    float | None,
    typer.Option(
        "--solver-time-limit",
        metavar="SECONDS",
        help="WD: take the solver's best after so long [UCUDNN_SOLVER_TIME_LIMIT]; default: wait for the optimum.",
    ),
]
SlabsOption = Annotated[
    bool | None,
    typer.Option(
        "--slabs/--no-slabs",
        help="Divide a single sample into ranges of its first spatial dimension where it needs more workspace than the"
        " limit [UCUDNN_SLABS].",
        show_default=False,
    ),
]
PlansOption = Annotated[
    str | None,
    typer.Option("--plans", metavar="FILE", help="Take the plans of a file, which --save-plans writes [UCUDNN_PLANS]."),
]
SavePlansOption = Annotated[
    Path | None,
    typer.Option("--save-plans", metavar="FILE", help="Write the plans to a file, which --plans takes."),
]
StrictOption = Annotated[
    bool | None,
    typer.Option(
        "--strict",
        help="With --torch: a convolution that cannot keep the limit is an error, and not left to PyTorch"
        " [UCUDNN_STRICT].",
        show_default=False,
    ),
]
BranchesOption = Annotated[
    bool,
    typer.Option(
        "--branches",
        help="WD: only the branches of one module run at the same time (inception3). Every other layer runs alone, with"
        " the whole total.",
    ),
]
DatabaseOption = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="File that keeps measurements, or off [UCUDNN_DATABASE]; default: a user cache."),
]
DevicesOption = Annotated[
    str | None,
    typer.Option(metavar="DEVICES", help="GPUs that measure together: 0,1 or all [UCUDNN_BENCHMARK_DEVICES]."),
]
ExhaustiveOption = Annotated[
    bool,
    typer.Option("--exhaustive", help="Measure every candidate, also those that cannot be part of the best plan."),
]
RemeasureOption = Annotated[
    bool,
    typer.Option("--remeasure", help="Measure everything again, whatever the database has of it [UCUDNN_REMEASURE]."),
]
TorchOption = Annotated[
    bool,
    typer.Option(
        "--torch",
        help="NETWORK is a PyTorch model, as module:callable, such as torchvision:resnet50. It runs once."
        " Mini-batch: 32 on a GPU and 2 on a CPU, unless --batch gives another.",
    ),
]
ShapeOption = Annotated[
    str, typer.Option("--shape", metavar="CxHxW", help="With --torch: the shape of one sample of the model's input.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
CsvOption = Annotated[bool, typer.Option("--csv", help="Print CSV, one line for each kernel.")]
DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype", metavar="TYPE", help="float32, float16, bfloat16 or float64.", autocompletion=_COMPLETE_DTYPE
    ),
]
MathOption = Annotated[
    str,
    typer.Option(
        "--math",
        metavar="MATH",
        help="For float32: tf32, or fma, which is without TF32.",
        autocompletion=_COMPLETE_MATH,
    ),
]
LayoutOption = Annotated[
    str,
    typer.Option(
        "--layout",
        metavar="LAYOUT",
        help="Channels first, the same as NCHW; or last, the same as NHWC.",
        autocompletion=_COMPLETE_LAYOUT,
    ),
]
DtypesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        help="float32 (default), float16, ...; may be repeated.",
        autocompletion=_COMPLETE_DTYPE,
    ),
]
MathsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--math",
        metavar="MATH",
        help="For float32: tf32 (default), fma; may be repeated.",
        autocompletion=_COMPLETE_MATH,
    ),
]
LayoutsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--layout",
        metavar="LAYOUT",
        help="Channels first (default) or last, the same as NCHW or NHWC; may be repeated.",
        autocompletion=_COMPLETE_LAYOUT,
    ),
]

# Options of `ucudnn memory`.
DEFAULT_DEVICE = "h200"
StepArgument = Annotated[
    str,
    typer.Argument(
        metavar="STEP",
        help=f"{', '.join(shipped_steps())}, a file of `ucudnn memory record`, or a model in PyTorch, MODULE:CALLABLE.",
        autocompletion=choices(*shipped_steps()),
    ),
]
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model in PyTorch, MODULE:CALLABLE, such as torchvision:resnet50.")
]
ModelShapeOption = Annotated[
    str, typer.Option("--shape", metavar="CxHxW", help="Shape of one sample of a model's input; 1024 for 1024 tokens.")
]
TokensOption = Annotated[bool, typer.Option("--tokens", help="A model's input is numbers of tokens.")]
LossOption = Annotated[
    str,
    typer.Option(
        "--loss", metavar="LOSS", help="cross-entropy, mse, or MODULE:CALLABLE of a model's output and labels."
    ),
]
OptimizerOption = Annotated[
    str, typer.Option("--optimizer", metavar="NAME", help="sgd (with momentum), adam, adamw or none.")
]
AutocastOption = Annotated[
    str | None, typer.Option("--autocast", metavar="TYPE", help="Type to which forward casts: bfloat16 or float16.")
]
KeepOption = Annotated[
    bool,
    typer.Option(
        "--keep-gradients",
        help="Gradients are set to zero before a step, not freed: zero_grad(set_to_none=False).",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help=f"{', '.join(shipped_devices())} or a file; default: the one it was measured on, or {DEFAULT_DEVICE}.",
        autocompletion=choices(*shipped_devices()),
    ),
]
AlgorithmsOption = Annotated[
    str,
    typer.Option(
        "--algorithms",
        metavar="CHOICE",
        help=f"{CHOICES[0]}: convolutions take a device's fastest algorithms; {CHOICES[1]}: those of least workspace.",
    ),
]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Picture to write: .png, .pdf or .svg.")
]

# The cases in which an option has no effect.
OUTPUT = NoEffect(options=("--csv",), beside=("--json",))
PROFILE = NoEffect(options=("--backend",), beside=("--profile",))
LIMIT = NoEffect(options=("--workspace",), beside=("--total-workspace",))
DIVISION = NoEffect(options=("--solver", "--solver-time-limit", "--branches"), without=("--total-workspace",))
MEASURED = NoEffect(options=("--database", "--devices", "--exhaustive", "--remeasure"), beside=("backend replay",))
CUDNN = NoEffect(options=("--candidates",), beside=("backend cpu", "backend cudnn:"))
FLOAT32 = NoEffect(
    options=("--math",),
    beside=("--dtype float16", "--dtype bfloat16", "--dtype float64"),
    without=("--dtype float32",),
)
UNDIVIDED = NoEffect(options=("--slabs",), beside=("policy undivided",))
_PLANNING = (OUTPUT, LIMIT, DIVISION, MEASURED, CUDNN, FLOAT32, UNDIVIDED)
PLAN = (PROFILE, *_PLANNING)
TIME = (
    NoEffect(options=("--candidates", "--branches", "--exhaustive"), beside=("--torch",)),
    NoEffect(options=("--shape", "--strict"), without=("--torch",)),
    *_PLANNING,
)
_RECORDING = ("NETWORK", "--out", "--batch", "--policy", "--candidates", "--dtype", "--math", "--layout", "--every")
_EXPORTING = (*_RECORDING, "--slabs", "--no-slabs", "--devices", "--exhaustive", "--remeasure")
RECORD = (
    NoEffect(options=("--export", "--backend", *_EXPORTING), beside=("--import",)),
    NoEffect(options=_EXPORTING, beside=("--export",)),
    MEASURED,
    CUDNN,
    FLOAT32,
    UNDIVIDED,
)
PLOT = (PROFILE, MEASURED, CUDNN, FLOAT32)


def typed_options(context: typer.Context) -> dict[str, object]:
    """Return the options of a command line, by the name that was typed, with their values."""
    typed: dict[str, object] = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[parameter.name or ""]
        name = (parameter.secondary_opts if value is False else parameter.opts)[0]
        typed[name if name.startswith("-") else name.upper()] = value
    return typed


def settings_of(context: typer.Context, rules: tuple[NoEffect, ...] = (), **instead: Any) -> Settings:
    """Return the settings that the options of a command make; see `ucudnn.command_line.read_settings`.

    Args:
        context: the command as it was typed.
        rules: the options that have no effect in some case.
        **instead: values by field of `Settings`, in place of what the options say.

    Raises:
        SettingsError: if an option or a variable has a value that it may not have, or an option has no effect.
    """
    return read_settings(typed_options(context), rules, **instead)


def budget_of(size: str | None) -> int | None:
    """Return bytes from the value of --budget; None without one.

    Raises:
        InvalidSizeError: if it is no size; the message names the option.
    """
    try:
        return None if size is None else parse_bytes(size)
    except InvalidSizeError as error:
        raise InvalidSizeError(f"--budget: {error}") from error


def candidates_of(name: str | None) -> Candidates:
    """Return candidates from the value of --candidates.

    Raises:
        SettingsError: if there are none of that name.
    """
    return Candidates.BEST if name is None else parse_choice(Candidates, name, "candidates")


def variant_of(dtype: str, math: str, layout: str) -> Variant:
    """Return a variant from the values of --dtype, --math and --layout.

    Raises:
        SettingsError: if one of them is not known.
    """
    (variant,) = variants([dtype], [math], [layout])
    return variant
