"""`ucudnn plot`: pictures of recorded plans, and one line if a picture is impossible."""

import re
import struct
import sys
from functools import partial

import pytest

from ucudnn.cli import plot as plot_commands
from ucudnn.errors import InfeasibleError
from ucudnn.networks.tables import CSV_HEADER
from ucudnn.reporting.report import Report

ALEXNET = ("alexnet", "--profile", "h200")


@pytest.fixture
def plot(call, monkeypatch, tmp_path):
    """Run `ucudnn plot` in a folder of its own; return exit status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    return partial(call, "plot")


def text(path):
    """Return the text in an SVG file, with blanks between lines."""
    return " ".join(re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text()))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["layers", *ALEXNET, "--workspace", "64MiB"],
            ["predicted time in ms", "37.1", "11.2", "64 MiB", "undivided", "powerOfTwo", "conv5", "BackwardFilter"],
        ),
        (
            ["desirable", *ALEXNET, "--layer", "conv2", "--workspace-limit", "120MiB"],
            ["conv2 (Forward)", "workspace in MiB", "predicted time in ms", "4×64", "2×128", "eng70", "eng67"],
        ),
        (
            ["configurations", *ALEXNET, "--layer", "conv2", "--workspace", "64MiB", "--operation", "BackwardFilter"],
            ["conv2 (BackwardFilter)", "64 MiB", "4.92 ms", "0.707 ms", "eng17", "8×32"],
        ),
        (
            ["division", *ALEXNET, "--total-workspace", "120MiB"],
            [
                "workspace in MiB",
                "WR",
                "8 MiB each",
                "120 MiB in turn",
                "WD",
                "120 MiB in total",
                "79.3",
                "119",
                "9.74",
            ],
        ),
    ],
)
def test_pictures_say_what_was_planned(plot, tmp_path, arguments, said):
    assert plot(*arguments, "--out", "picture.svg") == (0, "picture.svg\n", "")
    shown = text(tmp_path / "picture.svg")
    assert [each for each in ["alexnet", "mini-batch 256", "NVIDIA H200", *said] if each not in shown] == []


def test_a_png_is_half_a_page(plot, tmp_path):
    assert plot("layers", *ALEXNET, "--workspace", "8MiB", "--out", "picture.png")[0] == 0
    data = (tmp_path / "picture.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert struct.unpack(">II", data[16:24]) == (1050, 600)
    assert 10_000 < len(data) < 500_000


def test_branches_are_drawn_within_the_total(plot, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        plot_commands, "draw_division", lambda bars, out, title, times, shared: drawn.extend([title, times, *bars])
    )
    result = plot(
        "division", "inception3", "--profile", "h200", "--total-workspace", "256MiB", "--branches", "--out", "b.png"
    )
    assert result[:2] == (0, "b.png\n")  # a busy machine prints its progress
    title, times, *bars = drawn
    assert not times  # branches run at the same time, so that their times do not add up
    assert title.endswith("; 256 MiB, the groups in turn")
    assert [label for label, _ in bars[:2]] == ["Mixed_5b forward", "Mixed_5b backward"]
    assert all(isinstance(report, Report) and 0 < report.workspace_bytes <= 256 * 2**20 for _, report in bars)
    assert max(report.workspace_bytes for _, report in bars) > 200 * 2**20


def test_labels_of_limits_a_byte_apart_differ(plot, tmp_path):
    limits = ["--workspace", "67108862", "--workspace", "67108863"]
    assert plot("layers", *ALEXNET, *limits, "--policy", "undivided", "--out", "picture.svg")[0] == 0
    assert {"67108862 bytes", "67108863 bytes"} <= {*re.findall(r"\d+ bytes", text(tmp_path / "picture.svg"))}


def test_a_network_from_a_csv_file(plot, tmp_path):
    (tmp_path / "own.csv").write_text(f"{CSV_HEADER}\nonly,6,6,2,4,3,3,3,1,1,1,1\n")
    command = ["desirable", "own.csv", "--layer", "only:1", "--backend", "cpu", "--workspace", "0"]
    assert plot(*command, "--out", "picture.svg") == (0, "picture.svg\n", "")
    assert "IMPLICIT_GEMM" in text(tmp_path / "picture.svg")


BAD = """
layers ALEXNET --out picture.txt | picture.txt is no name of a picture: it must end in .pdf
layers ALEXNET --out none/picture.png | there is no folder none
desirable ALEXNET --layer conv9 OUT | --layer='conv9' is not in alexnet: give one of conv1
configurations CONV2 --operation Sideways OUT | --operation='Sideways' is not known
configurations CONV2 --policy all OUT | and not of 255: choose one of these, and a policy that tries no others
layers ALEXNET --workspace 64_apples OUT | size '64_apples' cannot be read
layers densenet121 --profile h200 --dtype float16 OUT | these shapes were recorded as float32 NCHW
division ALEXNET --total-workspace 1MiB --branches OUT | alexnet has none; inception3 does
"""


def typed(line):
    """Return the words of a line in which names stand for several words."""
    line = line.replace("CONV2", "ALEXNET --layer conv2").replace("ALEXNET", " ".join(ALEXNET))
    return line.replace("OUT", "--out picture.png").split()


@pytest.mark.parametrize("line", BAD.strip().splitlines())
def test_bad_input_ends_in_one_line_and_leaves_the_old_picture(plot, tmp_path, line):
    arguments, message = line.split(" | ")
    (tmp_path / "picture.png").write_bytes(b"old")
    status, out, error = plot(*typed(arguments))
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: ")
    assert message in error
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"old"]


def test_without_matplotlib_nothing_is_measured(plot, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(plot_commands, "open_benchmark", lambda *arguments, **options: pytest.fail("measured"))
    for line in ("layers ALEXNET OUT", "desirable CONV2 OUT", "configurations CONV2 OUT"):
        assert plot(*typed(line)) == (2, "", "error: pictures need matplotlib: pip install 'ucudnn[plot]'\n")


@pytest.mark.parametrize("possible", [True, False])
def test_an_infeasible_limit_is_left_out(plot, monkeypatch, tmp_path, possible):
    decide = plot_commands.decide

    def only_much(kernels, benchmark, settings, groups):
        if settings.workspace_limit_bytes < 2**20 or not possible:
            raise InfeasibleError("conv1 needs more", kernel="conv1", limit_bytes=0, required_bytes=1)
        return decide(kernels, benchmark, settings, groups)

    monkeypatch.setattr(plot_commands, "decide", only_much)
    limits = ["--workspace", "1KiB", "--workspace", "64MiB", "--policy", "undivided"]
    status, out, error = plot("layers", *ALEXNET, *limits, "--out", "picture.svg")
    if possible:
        assert (status, out, error) == (0, "picture.svg\n", "left out: 1 KiB undivided: conv1 needs more\n")
        assert "1 KiB" not in text(tmp_path / "picture.svg")
    else:
        assert (status, out, error) == (2, "", "error: conv1 needs more\n")
        assert not [*tmp_path.iterdir()]
