"""The host's cost of convolutions in a program that is tuned: passed on and replaced, through the gate and in Python.

    python -m bench.torch.gate_cost --backend cpu       half a minute on any machine with a C++ compiler
    python -m bench.torch.gate_cost                     the same on a GPU

The convolution is so small that its host time is all that counts. All ways take turns, and the results are medians in
microseconds of one call, with the quartiles of its samples.

    pytorch             nothing is turned on
    python, passed      PyTorch's operators have kernels in Python, from which the call goes on to PyTorch
    gate, passed        the same through the gate
    python, replaced    a kernel in Python finds a replacement, which does nothing
    gate, replaced      the gate finds it

Without a GPU, calls that cuDNN computes are timed as well. The stand-in for cuDNN of the tests returns at once:

    gate                cuDNN is called by the gate, undivided and in four micro-batches
    python, known       it is called in Python, with addresses that were seen before
    python, new         with addresses that were not: the calls are bound and their variant packs are built

The kernels of replaced calls do nothing, so what is measured is the way to them, with the output's allocation.
PyTorch's own call contains its kernel. A backward call computes the gradients of input and weight.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import CDLL
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from bench.native.cache import STUB, compiled
from bench.tools.results import save_run
from bench.tools.script import out_of, run_main, verdict
from bench.torch.measuring import built_gate, conditions, device_of, torch_command_line
from bench.torch.overhead import sample_us
from tests.support.direct_call import DirectCall
from tests.support.host_gpu import Host
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.native import build
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.torch.device.fast_tensors import empty_of
from ucudnn.torch.device.gpu import TorchGpu
from ucudnn.torch.device.timed_device import FreeBlocks, Program
from ucudnn.torch.gate.call_gate import CallGate, GateOutput, GateRule, look_of
from ucudnn.torch.overrides import process_overrides
from ucudnn.torch.steps.trial_ledger import TrialLedger
from ucudnn.torch.trials.candidate_source import CandidateSource
from ucudnn.torch.tuning.auto_interceptor import AutoInterceptor
from ucudnn.torch.tuning.tuner import Tuner

CALLS = 50  # so few that most samples are not interrupted by other processes
MOST_PASSED_US = 3.0
MOST_REPLACED_US = 5.0


class Idle(Program):
    """A device on which nothing is measured."""

    def mark(self) -> Any:
        """Return nothing."""

    def elapsed_ms(self, begin: Any, end: Any) -> float | None:
        """Return that no mark is reached."""
        return None

    def live_bytes(self) -> int:
        """Return 0."""
        return 0

    def peak_bytes(self) -> int:
        """Return 0."""
        return 0

    def free_blocks(self) -> FreeBlocks:
        """Return no blocks."""
        return FreeBlocks([], [])

    def reserved_bytes(self) -> int:
        """Return 0."""
        return 0

    def bytes_per_ms(self) -> float:
        """Return that the bandwidth is not known."""
        return 0.0

    def distance(self, found: torch.Tensor, expected: torch.Tensor) -> Callable[[], float]:
        """Return no distance."""
        return lambda: 0.0

    def host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        return tensor

    def poison(self, size_bytes: int) -> None:
        """Fill nothing."""

    def untouched(self) -> bool:
        """Return that no trial may run."""
        return False

    def was_away(self) -> bool:
        """Return that all calls were on the program's stream."""
        return False


class Nothing:
    """A kernel that computes nothing, so that only the way to it takes time."""

    calls = 0
    workspace_bytes = 0
    fuses = False

    def run(self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
        """Say that it is done."""
        return self.run_at(x.data_ptr(), w.data_ptr(), y.data_ptr())

    def run_at(self, x: int, w: int, y: int, bias: int = 0) -> bool:
        """Say that it is done."""
        return True


class Calls:
    """A forward and a backward call of one small convolution."""

    def __init__(self, device: torch.device) -> None:
        self.x = torch.randn(1, 1, 4, 4, device=device)
        self.weight = torch.randn(1, 1, 1, 1, device=device)
        self.grad = torch.randn(1, 1, 4, 4, device=device)

    def forward(self) -> torch.Tensor:
        """Return the output."""
        with torch.no_grad():
            return torch.conv2d(self.x, self.weight)

    def backward(self) -> tuple[torch.Tensor, ...]:
        """Return the gradients."""
        rest = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
        found: tuple[torch.Tensor, ...] = torch.ops.aten.convolution_backward.default(
            self.grad, self.x, self.weight, *rest
        )
        return found

    def rules(self) -> tuple[GateRule, GateRule]:
        """Return the rules that replace both by kernels that do nothing."""
        parts = [part for each in (self.grad, self.x, self.weight) for part in _look(each)]
        geometry = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)
        cudnn = torch.backends.cudnn
        flags = cudnn.deterministic or torch.are_deterministic_algorithms_enabled(), cudnn.enabled
        nothing = Nothing()
        out, near, filters = (_output(each, nothing) for each in (self.grad, self.x, self.weight))
        forward = look_of((*parts[4:], None, geometry, *flags, cudnn.allow_tf32))
        precision = torch._C._get_fp32_precision_getter("cuda", "conv")
        backward = look_of((*parts, geometry, (True, True, False), *flags, precision))
        return GateRule(forward, {0: out}), GateRule(backward, {0: near, 1: filters})


def _look(tensor: torch.Tensor) -> Sequence[Any]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, max(0, tensor.get_device())


def _output(tensor: torch.Tensor, kernel: Nothing) -> GateOutput:
    return GateOutput(kernel.run_at, tuple(tensor.shape), tensor.stride())


def in_python(device: torch.device) -> AutoInterceptor:
    """Return an interceptor that is settled, and has kernels that do nothing in place of those that it has seen."""

    def no_backend() -> Any:
        raise RuntimeError("nothing is tried here")

    def opened(_: int) -> Tuner:
        return Tuner(Idle(), CandidateSource(no_backend, lambda: torch.no_grad()), TrialLedger(0))

    aten = process_overrides.aten_kernels(device.type)
    return AutoInterceptor(opened, device.type, aten, process_overrides.refresh)


def replace(interceptor: AutoInterceptor, problems: Sequence[ConvolutionProblem]) -> None:
    """Let an interceptor replace the kernels of some problems, and pass on all others."""
    made: Any = interceptor
    for tuner in made._tuners.values():
        tuner.kernels = dict.fromkeys(problems, Nothing())
        tuner.uses_adopted = True
    for calls in (made._forward_calls, made._backward_calls):
        calls.begin_step()
        calls.look_at()
    made._tracker.optimizer_stepped(made)


def measured(gate: CallGate, calls: Calls, device: torch.device, samples: int) -> dict[str, Any]:
    """Return the microseconds of both calls in each way, and their quartiles."""
    interceptor = in_python(device)
    process_overrides.use(interceptor)
    calls.forward()
    calls.backward()
    problems = interceptor.problems()
    process_overrides.use(None)
    known, others = calls.rules(), Calls(device)
    others.x = others.grad = torch.randn(1, 1, 5, 4, device=device)
    unknown = others.rules()

    def python(chosen: Sequence[ConvolutionProblem]) -> None:
        replace(interceptor, chosen)
        process_overrides.use(interceptor)

    def opened(rules: tuple[GateRule, GateRule]) -> None:
        gate.open(device.type, rules[:1], rules[1:])

    ways: dict[str, Callable[[], object]] = {
        "pytorch": lambda: None,
        "python, passed": partial(python, ()),
        "gate, passed": partial(opened, unknown),
        "python, replaced": partial(python, problems),
        "gate, replaced": partial(opened, known),
    }
    found: dict[str, Any] = {}
    for name, run in (("forward", calls.forward), ("backward", calls.backward)):
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(samples):
            for way, turn_on in ways.items():
                turn_on()
                sample_us(run, 5, device)
                taken[way].append(sample_us(run, CALLS, device))
                gate.close()
                process_overrides.use(None)
        found[name] = {
            way: {"us": median(times), "quartiles_us": [quantiles(times)[at] for at in (0, 2)]}
            for way, times in taken.items()
        }
        print(f"{name:9}" + "".join(f"  {way} {each['us']:.2f} us" for way, each in found[name].items()), flush=True)
    return found


@contextmanager
def idle_cudnn() -> Iterator[Path]:
    """Yield the path of the tests' stand-in for cuDNN, which returns at once on a GPU that is the host's memory."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        path = compiled(build.header_folders(), STUB / "stub_cudnn.cpp", Path(folder) / "stub.so", "-shared", "-fPIC")
        stub = CDLL(str(path))
        host: Any = Host(stub)
        host.install(patched)
        host.empty_strided, host.empty_here = torch.empty_strided, empty_of("cpu")  # the tests count what is allocated
        stub.stub_idle(1)
        yield path
        stub.stub_idle(0)


def computed(gate: CallGate, samples: int) -> dict[str, Any]:
    """Return the microseconds of a forward call that the stand-in for cuDNN computes, with the gate and in Python."""
    found: dict[str, Any] = {}
    with idle_cudnn() as path:
        for parts in (1, 4):
            backend = CudnnBackend(library_path=str(path), device=TorchGpu(0))
            kernel: Any = DirectCall(backend, Operation.FORWARD, parts)
            (direct,), _ = kernel.rules()
            output = direct.outputs[0]._replace(compute=kernel.kernel.run_at, direct=None)
            in_python = direct._replace(outputs={0: output})

            def forgotten(kernel: Any = kernel) -> object:
                kernel.kernel._bound.clear()
                for step in kernel.kernel._plan.steps:
                    step.call._packs.clear()
                return kernel.run()

            ways = {
                "gate": (direct, kernel.run),
                "python, known": (in_python, kernel.run),
                "python, new": (in_python, forgotten),
            }
            taken: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(samples):
                for way, (rule, run) in ways.items():
                    gate.open("cpu", [rule], [])
                    sample_us(run, 5, torch.device("cpu"))
                    taken[way].append(sample_us(run, 10, torch.device("cpu")))
            gate.close()
            found[f"{parts} parts"] = {
                way: {"us": median(times), "quartiles_us": [quantiles(times)[at] for at in (0, 2)]}
                for way, times in taken.items()
            }
            print(
                f"{parts} parts"
                + "".join(f"  {way} {each['us']:.2f} us" for way, each in found[f"{parts} parts"].items())
            )
    return found


def main() -> None:
    """Measure, print and write."""
    parser = torch_command_line(__doc__, __spec__.name)
    parser.add_argument("--samples", type=int, default=200, help="samples of each call (%(default)s)")
    arguments = parser.parse_args()
    device = device_of(arguments)
    torch.set_num_threads(1)
    gate = built_gate()
    found = measured(gate, Calls(device), device, arguments.samples)
    required = []
    for name, count in (("forward", 1), ("backward", 2)):
        stock = found[name]["pytorch"]["us"]
        for way, most in (("passed", MOST_PASSED_US), ("replaced", MOST_REPLACED_US)):
            over = (found[name][f"gate, {way}"]["us"] - stock) / count
            required.append(verdict(f"{name}, {way} through the gate: each, over PyTorch's", over, most, " us"))
    run = {"conditions": conditions(device), "calls_us": found, "required": required}
    if device.type == "cpu":
        run["computed_us"] = computed(gate, arguments.samples)
    save_run(out_of(arguments), run)


if __name__ == "__main__":
    run_main(main)
