"""Options that several commands share, the cases in which one has no effect, and what a command line makes of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from ucudnn.backends.candidates import Candidates
from ucudnn.cli.help_text import choices
from ucudnn.command_line import NoEffect, read_settings
from ucudnn.errors import InvalidSizeError
from ucudnn.memory.devices.profile import shipped_devices
from ucudnn.memory.devices.roofline import CHOICES, link_between
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.sharded import RankLink, sharded_step
from ucudnn.networks.tables import CSV_HEADER, NETWORKS
from ucudnn.networks.variants import LAYOUT_NAMES, Variant, variants
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import DataType, MathMode
from ucudnn.profiles.format import shipped_profiles
from ucudnn.reporting.terminal import print_json, print_text
from ucudnn.settings import Settings
from ucudnn.units import parse_budget

_COLUMNS = ", ".join(CSV_HEADER.split(","))
NETWORK_HELP = f"{', '.join(NETWORKS)}, or a CSV file of layers with these columns in its first line: {_COLUMNS}."
COMPLETE_NETWORK = choices(*NETWORKS)
SIZES = [each.value for each in BatchSizePolicy]
MODEL_BATCH = 32  # of a PyTorch model, unless --batch gives another
DEFAULT_DEVICE = "h200"
DTYPES = [each.value for each in DataType]
MATHS = [each.value for each in MathMode]


def option(metavar: str | None, text: str, *names: str, complete: Iterable[str] = (), **more: Any) -> Any:
    """Return an option of typer: the name of its value, its help, its names, and what completes its value."""
    return typer.Option(
        *names, metavar=metavar, help=text, autocompletion=choices(*complete) if complete else None, **more
    )


NetworkArgument = Annotated[str, typer.Argument(metavar="NETWORK", help=NETWORK_HELP, autocompletion=COMPLETE_NETWORK)]
BatchOption = Annotated[
    int | None,
    option("N", "Mini-batch size; default: that of the network or the profile, or 16 where NumPy computes it."),
]
WORKSPACE = ("--workspace", "--workspace-limit")
WorkspaceOption = Annotated[
    str | None, option("SIZE", "WR: limit for each kernel, such as 64MiB [UCUDNN_DEFAULT_WORKSPACE_LIMIT].", *WORKSPACE)
]
PolicyOption = Annotated[
    str | None,
    option(
        "POLICY",
        "Micro-batch sizes to try: undivided, powerOfTwo, all or adaptive [UCUDNN_BATCH_SIZE_POLICY].",
        complete=SIZES,
    ),
]
BackendOption = Annotated[
    str | None,
    option(
        "BACKEND",
        "auto, cpu, cudnn or replay:NAME-or-path [UCUDNN_BACKEND].",
        complete=("auto", "cpu", "cudnn", *(f"replay:{name}" for name in shipped_profiles())),
    ),
]
ProfileOption = Annotated[
    str | None,
    option(
        "PROFILE",
        "A recorded profile, 'h200' or a file; the same as --backend replay:PROFILE.",
        complete=shipped_profiles(),
    ),
]
CandidatesOption = Annotated[
    str | None,
    option(
        "API",
        "cuDNN algorithms to choose from: best (default), graph, legacy, legacy-fma (without TF32) or every;"
        " best-plain and graph-plain are best and graph without the algorithms that copy the strided part of x first.",
        complete=(each.value for each in Candidates),
    ),
]
SlabsOption = Annotated[
    bool | None,
    option(
        None,
        "Divide a single sample into ranges of its first spatial dimension where it needs more workspace than the"
        " limit [UCUDNN_SLABS].",
        "--slabs/--no-slabs",
        show_default=False,
    ),
]
BranchesOption = Annotated[
    bool,
    option(
        None,
        "WD: only the branches of one module run at the same time (inception3). Every other layer runs alone, with"
        " the whole total.",
        "--branches",
    ),
]
DatabaseOption = Annotated[
    str | None, option("PATH", "File that keeps measurements, or off [UCUDNN_DATABASE]; default: a user cache.")
]
DevicesOption = Annotated[
    str | None, option("DEVICES", "GPUs that measure together: 0,1 or all [UCUDNN_BENCHMARK_DEVICES].")
]
JsonOption = Annotated[bool, option(None, "Print one JSON object.", "--json")]
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model in PyTorch, MODULE:CALLABLE, such as torchvision:resnet50.")
]
PlotOption = Annotated[Path | None, option("FILE", "Picture to write: .png, .pdf or .svg.")]


# A parameter of a command that is one of these classes stands for an option for each field; see `help_text`.
@dataclass(frozen=True, kw_only=True)
class VariantOptions:
    """In which data type, math mode and layout convolutions compute."""

    dtype: Annotated[str, option("TYPE", "float32, float16, bfloat16 or float64.", complete=DTYPES)] = "float32"
    math: Annotated[str, option("MATH", "For float32: tf32, or fma, which is without TF32.", complete=MATHS)] = "tf32"
    layout: Annotated[
        str, option("LAYOUT", "Channels first, the same as NCHW; or last, the same as NHWC.", complete=LAYOUT_NAMES)
    ] = "first"

    def variant(self) -> Variant:
        """Return the variant, or raise a SettingsError if a value is not known."""
        (found,) = variants([self.dtype], [self.math], [self.layout])
        return found


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions:
    """What is measured again, or though it cannot matter."""

    exhaustive: Annotated[
        bool, option(None, "Measure every candidate, also those that cannot be part of the best plan.", "--exhaustive")
    ] = False
    remeasure: Annotated[
        bool,
        option(None, "Measure everything again, whatever the database has of it [UCUDNN_REMEASURE].", "--remeasure"),
    ] = False


class _Printable(Protocol):
    def to_dict(self) -> dict[str, Any]: ...

    def to_csv(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """In which form a result is printed."""

    as_json: JsonOption = False
    as_csv: Annotated[bool, option(None, "Print CSV, one line for each kernel or plan.", "--csv")] = False

    def show(self, found: _Printable, table: Callable[[], None]) -> None:
        """Print a result as it is asked for; `table` prints it for people."""
        if self.as_json:
            print_json(found.to_dict())
        elif self.as_csv:
            print_text(found.to_csv())
        else:
            table()


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model in PyTorch is trained."""

    batch: Annotated[int | None, option("N", f"Mini-batch size; default: {MODEL_BATCH}.")] = None
    shape: Annotated[str, option("CxHxW", "Shape of one sample of a model's input; 1024 for 1024 tokens.")] = (
        "3x224x224"
    )
    tokens: Annotated[bool, option(None, "A model's input is numbers of tokens.", "--tokens")] = False
    loss: Annotated[str, option("LOSS", "cross-entropy, mse, or MODULE:CALLABLE of a model's output and labels.")] = (
        "cross-entropy"
    )
    optimizer: Annotated[str, option("NAME", "sgd (with momentum), adam, adamw or none.")] = "sgd"
    computed: VariantOptions
    autocast: Annotated[str | None, option("TYPE", "Type to which forward casts: bfloat16 or float16.")] = None


@dataclass(frozen=True, kw_only=True)
class RecordedOptions(ModelOptions):
    """How a model in PyTorch is trained whose step is recorded."""

    keep_gradients: Annotated[
        bool,
        option(
            None,
            "Gradients are set to zero before a step, not freed: zero_grad(set_to_none=False).",
            "--keep-gradients",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class StepOptions(RecordedOptions):
    """For which step and device commands plan, and how a step that is a model in PyTorch is recorded first."""

    batch: Annotated[
        int | None, option("N", f"Mini-batch size; default: that of the recorded step, {MODEL_BATCH} for a model.")
    ] = None
    device: Annotated[
        str | None,
        option(
            "DEVICE",
            f"{', '.join(shipped_devices())} or a file; default: the one it was measured on, the smallest of these that"
            f" has the budget, or {DEFAULT_DEVICE}.",
            "--device",
            "--gpu",
            complete=shipped_devices(),
        ),
    ] = None
    algorithms: Annotated[
        str,
        option(
            "CHOICE",
            f"{CHOICES[0]}: convolutions take a device's fastest algorithms; {CHOICES[1]}: those of least workspace.",
        ),
    ] = CHOICES[0]


PlanSecondsOption = Annotated[
    float,
    option("N", "After so many seconds of planning, auto is the best plan so far; inf for no bound.", min=0),
]

DivideOption = Annotated[
    bool, option(None, "Let segments of a model's step run for a part of the mini-batch at a time.", "--divide")
]


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Among how many GPUs a step is divided, and what joins them."""

    ranks: Annotated[
        int | None,
        option("N", "Plan for each of so many GPUs that share parameters, as FSDP divides them.", min=2, max=1 << 20),
    ] = None
    link: Annotated[
        float | None,
        option(
            "GB/S", "Bandwidth of each GPU to the others, the slowest on the way; default: the device's.", min=0.001
        ),
    ] = None
    latency: Annotated[
        float | None, option("MS", "Time from one GPU to the next, in milliseconds; default: 0.01.", min=0)
    ] = None

    def divided(self, graph: StepGraph, costs: Costs) -> tuple[StepGraph, Costs, RankLink | None]:
        """Return the step of each GPU, its costs and the link; the step itself, and no link, for one GPU."""
        if self.ranks is None:
            return graph, costs, None
        link = link_between(self.ranks, costs, self.link, self.latency)
        return *sharded_step(graph, costs, link), link


# The cases in which an option has no effect.
OUTPUT = NoEffect(options=("--csv",), beside=("--json",))
PROFILE = NoEffect(options=("--backend",), beside=("--profile",))
LIMIT = NoEffect(options=("--workspace",), beside=("--total-workspace",))
DIVISION = NoEffect(options=("--solver", "--solver-time-limit", "--branches"), without=("--total-workspace",))
MEASURED = NoEffect(options=("--database", "--devices", "--exhaustive", "--remeasure"), beside=("backend replay",))
CUDNN = NoEffect(options=("--candidates",), beside=("backend cpu", "backend cudnn:"))
FLOAT32 = NoEffect(
    options=("--math",), beside=("--dtype float16", "--dtype bfloat16", "--dtype float64"), without=("--dtype float32",)
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
    """Return the settings that the options of a command make; see `ucudnn.command_line.read_settings`."""
    return read_settings(typed_options(context), rules, **instead)


def budget_of(size: str | None, memory_bytes: int) -> int | None:
    """Return bytes from the value of --budget, which an InvalidSizeError names; None without one."""
    try:
        return None if size is None else parse_budget(size, memory_bytes)
    except InvalidSizeError as error:
        raise InvalidSizeError(f"--budget: {error}") from error
