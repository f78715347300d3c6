"""Options that several commands of the command line share."""

from typing import Annotated

import typer

from ucudnn.networks.tables import CSV_HEADER, NETWORKS

NETWORK_HELP = f"{', '.join(NETWORKS)}, or a CSV file of layers with the header {CSV_HEADER}."
NetworkArgument = Annotated[str, typer.Argument(metavar="NETWORK", help=NETWORK_HELP)]
BatchOption = Annotated[int | None, typer.Option("--batch", metavar="N", help="Mini-batch size.")]
WorkspaceOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="WR: limit for each kernel, such as 64MiB [UCUDNN_DEFAULT_WORKSPACE_LIMIT]."),
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
    ),
]
BackendOption = Annotated[
    str | None,
    typer.Option(metavar="BACKEND", help="auto, cpu, cudnn or replay:NAME-or-path [UCUDNN_BACKEND]."),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(metavar="PROFILE", help="Recorded profile, 'h200' or a file: short for --backend replay:PROFILE."),
]
CandidatesOption = Annotated[
    str,
    typer.Option(
        metavar="API",
        help="cuDNN algorithms to choose from: best, graph, legacy, legacy-fma or every; best-plain and graph-plain"
        " are the first two without copies of what strides read.",
    ),
]
SolverOption = Annotated[
    str | None,
    typer.Option(metavar="SOLVER", help="WD's solver: auto, highs, cbc, glpk, gurobi or cplex [UCUDNN_SOLVER]."),
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
        help="Compute in ranges of the first spatial dimension what single samples need too much for [UCUDNN_SLABS].",
        show_default=False,
    ),
]
BranchesOption = Annotated[
    bool,
    typer.Option(
        "--branches",
        help="WD: only branches of one module run at the same time (inception3); all else has the total for itself.",
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
    bool, typer.Option("--exhaustive", help="Measure also what cannot matter, to see that it does not.")
]
TorchOption = Annotated[
    bool,
    typer.Option(
        "--torch", help="NETWORK is a PyTorch model, module:callable such as torchvision:resnet50; runs it once."
    ),
]
ShapeOption = Annotated[
    str, typer.Option("--shape", metavar="CxHxW", help="--torch: shape of one sample of the model's input.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
CsvOption = Annotated[bool, typer.Option("--csv", help="Print CSV, one line for each kernel.")]
DtypeOption = Annotated[str, typer.Option("--dtype", metavar="TYPE", help="float32, float16, bfloat16 or float64.")]
MathOption = Annotated[str, typer.Option("--math", metavar="MATH", help="Of float32: tf32, or fma without it.")]
LayoutOption = Annotated[str, typer.Option("--layout", metavar="LAYOUT", help="Channels first (NCHW), or last (NHWC).")]
DtypesOption = Annotated[
    list[str] | None, typer.Option("--dtype", metavar="TYPE", help="float32 (default), float16, ...; may be repeated.")
]
MathsOption = Annotated[
    list[str] | None, typer.Option("--math", metavar="MATH", help="Of float32: tf32 (default), fma; may be repeated.")
]
LayoutsOption = Annotated[
    list[str] | None,
    typer.Option("--layout", metavar="LAYOUT", help="Channels first (default) or last; may be repeated."),
]
