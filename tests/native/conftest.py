"""Compiles the C++ side against cuDNN's headers, a stand-in for cuDNN, and a program that calls it as Caffe does."""

import json
import subprocess
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.support.paths import NATIVE, ROOT, alone_in, shared_folder
from tests.support.reference import reference_convolution
from tests.support.toolchain import environment, open_toolchain
from ucudnn.native import build
from ucudnn.problem import ConvolutionProblem, Operation

SIZES = {"n": 8, "c": 4, "h": 7, "w": 6, "k": 6, "r": 3, "pad": 1, "stride": 1, "groups": 1}
"""Sizes of the convolution, by the driver's names. A sample of x needs 672 bytes of workspace."""


@pytest.fixture(scope="session")
def toolchain(tmp_path_factory):
    return open_toolchain(shared_folder(tmp_path_factory, "native"))


@pytest.fixture(scope="session")
def libraries(toolchain):
    """Return the folder of libucudnn.so and of the stand-in libcudnn.so.9, which also stands in for CUDA's driver."""
    if build.libpython() is None:
        pytest.skip("this Python has no shared library")
    shared = "-shared", "-fPIC", "-Wl,-soname,libcudnn.so.9"
    stub = toolchain.compile_once(NATIVE / "stub_cudnn.cpp", "libcudnn.so.9", *shared)
    with alone_in(toolchain.folder):
        if not (toolchain.folder / "libcuda.so.1").exists():
            (toolchain.folder / "libcuda.so.1").symlink_to(stub)
        build.build(toolchain.folder, toolchain.headers)
    return toolchain.folder


@dataclass
class Run:
    """The output of the driver."""

    arguments: dict
    iterations: list = field(default_factory=list)
    calls: list = field(default_factory=list)  # of each iteration
    other: dict = field(default_factory=dict)
    tensors: dict = field(default_factory=dict)
    before: dict = field(default_factory=dict)
    errors: str = ""

    def problem(self, operation):
        sizes = {"batch": "n", "channels": "c", "filters": "k", "groups": "groups"}
        pairs = {"spatial": "hw", "kernel": "rr", "padding": ["pad"] * 2, "stride": ["stride"] * 2}
        one_each = {field: self.arguments[name] for field, name in sizes.items()}
        two_each = {field: tuple(self.arguments[name] for name in names) for field, names in pairs.items()}
        return ConvolutionProblem(operation=operation, **one_each, **two_each)

    def check(self, *, iterations=1):
        """Compare all results with a reference in float64."""
        x, w, y, dx, dw, dy = (self.before[name].astype(np.float64) for name in NAMES)
        expected = {"x": x, "w": w, "dy": dy}
        forward = reference_convolution(self.problem(Operation.FORWARD), x, w, y)
        for _ in range(iterations):
            y = self.arguments["alpha"] * forward + self.arguments["beta"] * y
        expected["y"] = y
        expected["dw"] = dw + iterations * reference_convolution(self.problem(Operation.BACKWARD_FILTER), x, dw, dy)
        expected["dx"] = reference_convolution(self.problem(Operation.BACKWARD_DATA), dx, w, dy)
        exact = 1e-12 if self.arguments.get("double") else 2e-5
        for name, values in expected.items():
            np.testing.assert_allclose(self.tensors[name], values, rtol=exact, atol=exact * 10, err_msg=name)

    def batches(self, operation, iteration=0):
        """Return the batch of each call of an operation."""
        number = list(Operation).index(operation)
        return [call["batch"] for call in self.calls[iteration] if call["operation"] == number]


NAMES = ("x", "w", "y", "dx", "dw", "dy")


@pytest.fixture(scope="session")
def process(libraries):
    """Return a function that runs a command with variables, beside the stand-ins for cuDNN and CuPy."""

    def run_command(command, **variables):
        env = environment(libraries) | variables
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=ROOT, timeout=600)

    return run_command


@pytest.fixture(scope="session")
def computes_in_python(libraries, process):
    """Return a function that runs a Python program of this folder on both libraries; the program says it computed."""

    def run_program(name, *words, **variables):
        both = libraries / "libcudnn.so.9", libraries / build.LIBRARY
        done = process([sys.executable, NATIVE / f"{name}.py", *both, *words], **variables)
        assert (done.returncode, done.stdout, done.stderr) == (0, "computed\n", "")

    return run_program


@pytest.fixture
def run(process, tmp_path, linked):
    """Return a function that runs the driver; arguments are sizes and options, `env` sets variables."""
    driver = linked("driver")

    def go(*, env=None, **arguments):
        arguments = {"alpha": 1, "beta": 0, "limit": 3000, **SIZES, **arguments}
        result = Run(arguments)
        dtype = np.float64 if arguments.get("double") else np.float32
        a = arguments
        output = [(a[side] + 2 * a["pad"] - a["r"]) // a["stride"] + 1 for side in "hw"]
        shapes = {
            "x": (a["n"], a["c"], a["h"], a["w"]),
            "w": (a["k"], a["c"] // a["groups"], a["r"], a["r"]),
            "y": (a["n"], a["k"], *output),
        }
        shapes |= {f"d{name}": shape for name, shape in shapes.items()}
        rng = np.random.default_rng(1)
        result.before = {name: rng.uniform(-1, 1, shapes[name]).astype(dtype) for name in NAMES}
        (tmp_path / "in").write_bytes(b"".join(result.before[name].tobytes() for name in NAMES))
        words = [f"{key}={value}" for key, value in arguments.items()]
        done = process([driver, *words, f"in={tmp_path / 'in'}", f"out={tmp_path / 'out'}"], **(env or {}))
        result.errors = done.stderr
        assert done.returncode == 0, done.stderr
        for line in done.stdout.splitlines():
            record = json.loads(line)
            if "iteration" in record:
                result.iterations.append(record)
                result.calls.append([])
            elif "api" in record:
                result.calls[-1].append(record)
            else:
                result.other |= record
        values = np.fromfile(tmp_path / "out", dtype)
        for name in NAMES:
            size = int(np.prod(shapes[name]))
            result.tensors[name], values = values[:size].reshape(shapes[name]), values[size:]
        return result

    return go


@pytest.fixture(scope="session")
def linked(libraries, toolchain):
    """Return a function that compiles a program of this folder against both libraries."""

    def link(name):
        flags = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lucudnn", "-l:libcudnn.so.9", "-pthread"]
        return toolchain.compile_once(NATIVE / f"{name}.cpp", name, *flags, "-Wall", "-Wextra")

    return link


@pytest.fixture(scope="session")
def computes(process, linked):
    """Return a function that runs a compiled program with words and variables, and returns what it says on stderr."""

    def run_program(name, *words, **variables):
        done = process([linked(name), *words], **variables)
        assert (done.returncode, done.stdout) == (0, "computed\n"), done.stderr
        return done.stderr

    return run_program
