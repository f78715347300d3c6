"""Compiles the C++ side against cuDNN's headers, a stand-in for cuDNN, and a program that calls it as Caffe does."""

import json
import subprocess
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.support.paths import NATIVE, alone_in, shared_folder
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
        a = self.arguments
        return ConvolutionProblem(
            operation=operation,
            batch=a["n"],
            channels=a["c"],
            spatial=(a["h"], a["w"]),
            filters=a["k"],
            kernel=(a["r"], a["r"]),
            padding=(a["pad"],) * 2,
            stride=(a["stride"],) * 2,
            groups=a["groups"],
        )

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


@pytest.fixture
def run(libraries, toolchain, tmp_path, driver):
    """Return a function that runs the driver; arguments are sizes and options, `env` sets variables."""

    def go(*, env=None, ok=True, **arguments):
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
        done = subprocess.run(
            [driver, *words, f"in={tmp_path / 'in'}", f"out={tmp_path / 'out'}"],
            capture_output=True,
            text=True,
            check=False,
            env=environment(libraries) | (env or {}),
            timeout=600,
        )
        result.errors = done.stderr
        assert (done.returncode == 0) is ok, done.stderr
        for line in done.stdout.splitlines():
            record = json.loads(line)
            if "iteration" in record:
                result.iterations.append(record)
                result.calls.append([])
            elif "api" in record:
                result.calls[-1].append(record)
            else:
                result.other |= record
        if ok:
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
def computes(libraries, linked):
    """Return a function that compiles a program, which prints that it computed.

    What it returns runs the program with the words of a command line and with variables, and returns what the program
    says on stderr.
    """

    def compiled(name):
        program = linked(name)

        def run_program(*words, **variables):
            done = subprocess.run(
                [program, *words],
                capture_output=True,
                text=True,
                check=False,
                env=environment(libraries) | variables,
                timeout=600,
            )
            assert (done.returncode, done.stdout) == (0, "computed\n"), done.stderr
            return done.stderr

        return run_program

    return compiled


@pytest.fixture(scope="session")
def driver(linked):
    """Return the program."""
    return linked("driver")
