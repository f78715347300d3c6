"""Programs as a whole: run by `python -m ucudnn.torch`, timed by `ucudnn time --torch`, in several ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.support.documents import blocks  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402
from ucudnn.cli import app  # noqa: E402
from ucudnn.cli.torch_model import time_model  # noqa: E402
from ucudnn.errors import BackendUnavailableError, InvalidNetworkError  # noqa: E402
from ucudnn.torch.__main__ import main  # noqa: E402
from ucudnn.torch.model_timing import find_factory, parse_shape  # noqa: E402
from ucudnn.torch.overrides import process_overrides  # noqa: E402

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import torch

if __name__ == "__main__":
    x, w = torch.ones(2, 3, 6, 6), torch.ones(4, 3, 3, 3, requires_grad=True)
    y = torch.nn.functional.conv2d(x, w)
    y.sum().backward()
    print(sys.argv[1:], float(y.detach()[0, 0, 0, 0]), float(w.grad[0, 0, 0, 0]))
    sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else None)
"""


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    process_overrides.clear()


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def run(capsys, *arguments):
    """Return exit status, output and errors of a program that is run here."""
    with pytest.raises(SystemExit) as end:
        main([str(each) for each in arguments])
    out, errors = capsys.readouterr()
    return end.value.code, out, errors


def test_options_before_the_program_are_ours_and_those_after_it_its_own(program, capsys):
    code, out, errors = run(capsys, "--backend", "cpu", "--report", program, "3", "--workspace", "-m", "--report")
    assert code == 3
    assert out == "['3', '--workspace', '-m', '--report'] 27.0 32.0\n"
    assert "convolutions through ucudnn: 2, left to PyTorch: 0" in errors
    assert process_overrides.interceptor is None


def test_a_module_is_run_as_python_does(program, capsys, monkeypatch):
    monkeypatch.setenv("UCUDNN_BACKEND", "cpu")
    sys.path.insert(0, str(program.parent))
    code, out, errors = run(capsys, "-m", "program", "2", "--help")
    assert (code, out) == (2, "['2', '--help'] 27.0 32.0\n")
    assert errors == ""


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "give a program"),
        (["nowhere.py"], "nowhere.py is not there"),
        (["--workspace", "much", "PROGRAM"], "size 'much' cannot be read"),
        (["--backend", "replay:h200", "PROGRAM"], "plans but cannot execute"),
        (["--workspac", "1MiB", "PROGRAM"], "unrecognized arguments"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(program, capsys, arguments, error):
    code, out, errors = run(capsys, *(program if each == "PROGRAM" else each for each in arguments))
    assert (code, out) == (2, "")
    assert error in errors


def test_the_help_teaches(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for text in ("unchanged", "--workspace SIZE", "torchrun --nproc-per-node 2 -m ucudnn.torch", "UCUDNN_DATABASE"):
        assert text in out


def test_a_process_of_its_own(program):
    done = subprocess.run(
        [sys.executable, "-m", "ucudnn.torch", "--verbose", program],
        capture_output=True,
        text=True,
        env={**os.environ, "UCUDNN_BACKEND": "cpu", "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert done.stdout == "[] 27.0 32.0\n"
    assert done.stderr.count("ucudnn.handle: planned ") == 2
    assert "planned Forward 2x3x6x6 * 4x3x3x3 float32 NCHW: " in done.stderr


EXAMPLES = [block for block in blocks("python") if "import torch" in block]


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_documents_examples_run(capsys, example):
    exec(compile(example, "documents", "exec"), {})
    assert "convolutions through ucudnn: 5, left to PyTorch: 0" in capsys.readouterr().out


def small():
    """Return a model of two convolutions, for `ucudnn time`."""
    n = torch.nn
    return n.Sequential(n.Conv2d(3, 4, 3), n.ReLU(), n.ConvTranspose2d(4, 2, 2, stride=2))


def headed():
    """Return a model whose output is a dict."""

    class Headed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = torch.nn.Conv1d(2, 3, 3)

        def forward(self, x):
            return {"out": (self.trunk(x), "not a tensor")}

    return Headed()


NAME = f"{__name__}:small"
QUICK = ("--repeats", "1", "--time-limit", "1", "--backend", "cpu", "--shape", "3x8x8")


def time(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["ucudnn", "time", "--torch", *arguments])
    with pytest.raises(SystemExit) as end:
        app.main()
    out, errors = capsys.readouterr()
    return end.value.code, out, errors


def test_a_model_is_timed(monkeypatch, capsys):
    code, out, _ = time(monkeypatch, capsys, NAME, *QUICK, "--batch", "4", "--workspace", "64KiB")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    kernels_of = [row[:2] for row in rows if row[1] in ("Forward", "BackwardData", "BackwardFilter")]
    # What is transposed goes forward as the gradient of another convolution's input, and the other way round.
    assert sorted(kernels_of) == sorted(
        [["0", "Forward"], ["0", "BackwardFilter"], ["2", "BackwardData"], ["2", "Forward"], ["2", "BackwardFilter"]]
    )
    assert "convolutions through ucudnn: 5, left to PyTorch: 0" in out
    assert "PyTorch ms" not in out
    assert process_overrides.interceptor is None


def test_a_model_as_json_and_csv(monkeypatch, capsys):
    code, out, _ = time(monkeypatch, capsys, NAME, *QUICK, "--json", "--dtype", "float64", "--layout", "last")
    assert code == 0
    answer = json.loads(out)
    assert answer["calls"] == 5
    assert all(each["measured_ms"] > 0 for each in answer["layers"])
    assert all(each["problem"].endswith("float64 NHWC") for each in answer["layers"])
    code, out, _ = time(monkeypatch, capsys, NAME, *QUICK, "--csv")
    assert code == 0
    assert len(out.splitlines()) == 6


def test_models_of_any_output(monkeypatch, capsys):
    code, out, _ = time(monkeypatch, capsys, f"{__name__}:headed", *QUICK[:-1], "2x9")
    assert code == 0
    assert "trunk  Forward" in out


@pytest.mark.parametrize(
    ("name", "shape", "error"),
    [
        ("small", "3x8x8", "names no model: give module:callable"),
        ("nowhere:small", "3x8x8", "No module named 'nowhere'"),
        (f"{__name__}:nothing", "3x8x8", "no attribute 'nothing'"),
        (f"{__name__}:NAME", "3x8x8", "is a str and cannot be called"),
        (f"{__name__}:dict", "3x8x8", "no attribute 'dict'"),
        ("builtins:dict", "3x8x8", r"returns a dict, no torch\.nn\.Module"),
        (NAME, "4x8x8", "does not take 2x4x8x8"),
        (NAME, "3x8x?", "cannot be read"),
        (NAME, "3", "is none of a sample"),
    ],
)
def test_models_that_are_none(name, shape, error):
    from ucudnn import Effort
    from ucudnn.networks.variants import Variant
    from ucudnn.settings import Settings

    with pytest.raises(InvalidNetworkError, match=error):
        time_model(name, shape, None, Variant(), Settings.load({}, backend="cpu"), Effort(repeats=1, time_limit_ms=1))


def test_torchvision_is_looked_for_where_it_keeps_its_models(monkeypatch, tmp_path):
    (tmp_path / "visionlike").mkdir()
    (tmp_path / "visionlike" / "__init__.py").write_text("")
    (tmp_path / "visionlike" / "models.py").write_text("class Nets:\n    def net(): ...\n")
    monkeypatch.chdir(tmp_path)
    assert find_factory("visionlike:Nets.net").__name__ == "net"
    assert parse_shape("3, 224, 224") == (3, 224, 224)


def test_without_pytorch_time_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ucudnn.torch.model_timing", None)
    from ucudnn import Effort
    from ucudnn.networks.variants import Variant
    from ucudnn.settings import Settings

    with pytest.raises(BackendUnavailableError, match=r"pip install 'ucudnn\[torch\]'"):
        time_model(NAME, "3x8x8", None, Variant(), Settings(), Effort())


@pytest.mark.parametrize("arguments", [["-m", "ucudnn.torch", "script.py"], ["-c", "import ucudnn.torch"]])
def test_without_pytorch_the_package_says_what_to_install(tmp_path, arguments):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "ucudnn.torch needs PyTorch 2.10 or newer: pip install 'ucudnn[torch]'" in last
    assert "Traceback" not in done.stderr or "-c" in arguments


RANK = """
import sys
import torch
import torch.distributed as distributed
import ucudnn.torch

rank, store = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
on = ucudnn.torch.enable(benchmark_devices="ranks", effort=ucudnn.Effort(warmup=0, repeats=1, time_limit_ms=1))
x, w = torch.randn(4, 3, 8, 8), torch.randn(4, 3, 3, 3)
torch.nn.functional.conv2d(x, w)  # before there are ranks: PyTorch's own
assert on.report().calls == 0, on.report()
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.nn.functional.conv2d(x, w)  # what failed is tried again after one call
module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 3))
module = torch.nn.parallel.DistributedDataParallel(module)
for _ in range(2):
    module(x + rank).square().mean().backward()
del module  # the reducer goes before its process group
distributed.barrier()
distributed.destroy_process_group()
summary = on.report()
for layer in summary.layers:
    print(layer.layer, layer.problem, layer.configuration, layer.planned_ms, layer.calls)
print("left", sum(summary.left.values()), summary.left, file=sys.stderr)
"""


def test_ranks_plan_once_and_the_same(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("PyTorch without torch.distributed")
    ranks = run_ranks(RANK, tmp_path / "store", OMP_NUM_THREADS="1", UCUDNN_BACKEND="cpu")
    (first, errors, status), (second, other_errors, other_status) = ranks
    assert (status, other_status) == (0, 0), errors + other_errors
    assert first == second
    assert len(first.splitlines()) == 5  # two layers, whose first has no gradient of its input
    for each in (errors, other_errors):
        assert "left 2 " in each
        assert "torch.distributed is not initialized" in each
