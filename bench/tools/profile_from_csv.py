"""Turn a table of measured cuDNN algorithms into a profile from which ucudnn plans.

    python -m bench.tools.profile_from_csv TABLE.csv.gz PROFILE.json --condition "device=NVIDIA H200" ...

The table has the columns network, layer, count, channels, height, width, filters, kernel, pad, stride, operation,
batch, api, algorithm, time_ms, workspace_bytes and numerical_notes (numbers of cudnnBackendNumericalNote_t).
"""

import csv
import gzip
from pathlib import Path

from bench.tools.script import command_line, run_main
from ucudnn.problem import ConvolutionProblem, MathMode, Operation
from ucudnn.profiles.format import Profile, encode_profile
from ucudnn.profiles.measurement import Algorithm, Measurement
from ucudnn.reporting.output_file import write_whole

NOTES = (
    "TENSOR_CORE",
    "DOWN_CONVERT_INPUTS",
    "REDUCED_PRECISION_REDUCTION",
    "FFT",
    "NONDETERMINISTIC",
    "WINOGRAD",
    "WINOGRAD_TILE_4x4",
    "WINOGRAD_TILE_6x6",
    "WINOGRAD_TILE_13x13",
    "STRICT_NAN_PROP",
)
"""Names of cudnnBackendNumericalNote_t, in order."""

NONDETERMINISTIC = {("BackwardData", "ALGO_0"), ("BackwardFilter", "ALGO_0"), ("BackwardFilter", "ALGO_3")}
"""Legacy algorithms that are not deterministic, by cuDNN's documentation."""


def problem_of(row: dict[str, str]) -> ConvolutionProblem:
    """Return the problem of a row of the table."""
    return ConvolutionProblem(
        operation=Operation(row["operation"]),
        batch=int(row["batch"]),
        channels=int(row["channels"]),
        spatial=(int(row["height"]), int(row["width"])),
        filters=int(row["filters"]),
        kernel=(int(row["kernel"]),) * 2,
        padding=(int(row["pad"]),) * 2,
        stride=(int(row["stride"]),) * 2,
        math=MathMode.FMA if row["api"].endswith("-fma") else MathMode.TF32,
    )


def record_of(row: dict[str, str]) -> Measurement:
    """Return the measurement of a row of the table."""
    notes = [NOTES[int(note)] for note in row["numerical_notes"].split()]
    if row["api"].startswith("legacy") and (row["operation"], row["algorithm"]) in NONDETERMINISTIC:
        notes.append("NONDETERMINISTIC")
    algorithm = Algorithm(
        name=row["algorithm"],
        workspace_bytes=int(row["workspace_bytes"]),
        api=row["api"].removesuffix("-fma"),
        notes=tuple(notes),
    )
    return Measurement(algorithm=algorithm, time_ms=float(row["time_ms"]))


def main() -> None:
    """Read the table and write the profile."""
    parser = command_line(__doc__, __spec__.name)
    parser.add_argument("table", type=Path, help="compressed CSV file")
    parser.add_argument("profile", type=Path, help="file to write")
    parser.add_argument("--condition", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    arguments = parser.parse_args()
    recordings: dict[str, dict[ConvolutionProblem, tuple[Measurement, ...]]] = {}
    with gzip.open(arguments.table, "rt", newline="") as file:
        for row in csv.DictReader(file):
            recording = recordings.setdefault(row["network"], {})
            problem = problem_of(row)
            recording[problem] = (*recording.get(problem, ()), record_of(row))
    conditions = dict(condition.split("=", 1) for condition in arguments.condition)
    profile = Profile(name=arguments.profile.stem, conditions=conditions, recordings=recordings)
    write_whole(arguments.profile, encode_profile(profile, compress=arguments.profile.suffix == ".gz"))


if __name__ == "__main__":
    run_main(main)
