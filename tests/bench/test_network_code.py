"""bench.torch.network_code: what makes a cell void, and what does not."""

import subprocess
import sys
import threading
from argparse import Namespace
from pathlib import Path
from textwrap import dedent

import pytest

from bench.tools.results import ROOT
from bench.torch import network_code

pytest.importorskip("torch")

import torch

import ucudnn.torch
from bench.torch import network_step

MODELS = (ROOT / network_code.MODELS).read_text(encoding="utf-8")
TIMES, SETTING = ("bench/torch/network_times.py", "bench/torch/network_setting.py")


def test_comments_docstrings_and_empty_lines_do_not_count():
    bare = "def a(x):\n    y = '# no comment'\n    return x\n"
    explained = '''
        """A module."""
        # a remark

        def a(x):  # returns
            """Return x,

            always.
            """
            y = '# no comment'

            return x
        '''
    wanted = network_code.what_counts(bare)
    assert network_code.what_counts(dedent(explained)) == wanted
    assert network_code.what_counts(bare.replace("return x", "return -x")) != wanted
    assert network_code.what_counts(bare.replace("# no", "# a")) != wanted
    assert network_code.what_counts("if x:\n    a()\nb()\n") != network_code.what_counts("if x:\n    a()\n    b()\n")


def changes(source, old, new, names):
    assert source.count(old) == 1, old
    return network_code.what_counts(source.replace(old, new), names) != network_code.what_counts(source, names)


@pytest.mark.parametrize(
    ("path", "old", "new", "counts"),
    [
        (network_code.STEP, '"vgg16": ("own", 64, ', '"vgg16": ("own", 32, ', True),
        (network_code.STEP, '"resnet50": ("own", 256, ', '"resnet50": ("own", 128, ', False),
        (network_code.STEP, '    "unet3d": (', '    "more": ("timm", 1, (3, 8, 8)),\n    "unet3d": (', False),
        (network_code.STEP, "momentum=0.9", "momentum=0.8", True),  # in step_of, which measure calls
        (network_code.STEP, "return own.inception_loss", "return -own.inception_loss", True),  # step_of calls it
        (TIMES, "_HOST_STEPS = 9", "_HOST_STEPS = 5", True),
        (TIMES, "from itertools import pairwise", "from elsewhere import pairwise", True),  # for the clock
        (SETTING, "benchmark = way == setting", "benchmark = True", True),
        (network_code.CELL, "from statistics import median", "from elsewhere import median", True),
        (network_code.CELL, 'help="timed steps (%(default)s)"', 'help="steps that are timed"', False),
        (network_code.CELL, 'raise SystemExit("error: nobody', 'raise SystemExit("no one', False),
    ],
)
def test_of_the_scripts_counts_what_measures_the_network(path, old, new, counts):
    names = network_code.measuring("vgg16")[path]
    assert changes((ROOT / path).read_text(encoding="utf-8"), old, new, names) == counts


def test_a_new_model_and_a_change_of_another_one_do_not_count():
    names = ["vgg16", "inception_loss"]
    assert not changes(MODELS, "def resnet50(", "def new():\n    return nn.ReLU()\n\n\ndef resnet50(", names)
    assert not changes(MODELS, "class GPT(", "class GPT2(", names)
    assert changes(MODELS, "0.4 * F.cross_entropy", "0.3 * F.cross_entropy", names)


def test_each_network_has_the_definitions_that_make_it():
    for network, (source, *_) in network_step.NETWORKS.items():
        parts = list(network_code.digests(network, []))
        assert f"{network_code.CELL}:measure" in parts
        (step,) = (part.partition(":")[2] for part in parts if part.startswith(network_code.STEP))
        assert f"NETWORKS[{network}]" in step.split(",")
        assert "NETWORKS" not in step.split(",")
        (models,) = (part.partition(":")[2] for part in parts if part.startswith(network_code.MODELS))
        assert models.split(",") == ([network] if source == "own" else []) + ["inception_loss"]
        assert (f"{network_code.TRIAL_MODELS}:small_resnet" in parts) == (network == network_step.TRIAL)


def imported(backend):
    code = "import ucudnn, ucudnn.torch, bench.torch.network_cell, bench.torch.network_code as code\n"
    command = [sys.executable, "-c", f"{code}print(*code.ran('auto', {backend!r}), sep='\\n')"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def test_a_cell_depends_on_no_script_document_report_or_planning_without_a_gpu():
    found = imported("cudnn")
    assert {"ucudnn/handle.py", "ucudnn/torch/tuning/tuner.py", "ucudnn/torch/gate/src/call_gate.cpp"} < set(found)
    others = (
        "bench/",
        "docs/",
        *(f"ucudnn/{each}/" for each in ("cli", "memory", "native", "reporting", "backends/cpu")),
    )
    assert [each for each in found if each.startswith(others)] == []
    assert network_code.ran("stock", "cudnn") == network_code.ran("stock-off", "cudnn") == []
    assert set(found) < set(network_code.whole("auto", "cudnn"))


@pytest.mark.parametrize("options", [{}, {"tune": "first"}])
def test_what_does_not_count_runs_in_no_step(options, tmp_path):
    seen = set()

    def follow(frame, event, argument):
        seen.add(frame.f_code.co_filename)

    file = str(tmp_path / "database.sqlite")
    with ucudnn.torch.enable(backend="cpu", workspace_limit="64KiB", database=file, **options):
        step, _ = network_step.step_of(Namespace(network="small", form="nchw"), torch.device("cpu"))
        threading.setprofile(follow)
        sys.setprofile(follow)
        try:
            for _ in range(3):
                step()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    ran = [path for path in map(Path, seen) if path.is_relative_to(ROOT / "ucudnn")]
    names = {path.relative_to(ROOT).as_posix() for path in ran}
    assert {"ucudnn/execution/launcher.py", "ucudnn/backends/cpu/gemm.py"} < names
    assert names == set(network_code._counting(ran, "cpu"))
