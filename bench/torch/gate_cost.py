"""The host's cost of convolutions in a program that is tuned: passed on and replaced by the gate.

    python -m bench.torch.gate_cost --backend cpu       half a minute on any machine with a C++ compiler
    python -m bench.torch.gate_cost                     the same on a GPU

The convolution is so small that its host time is all that counts. All ways take turns, and the results are medians in
microseconds of one call, with the quartiles of its samples.

    pytorch         nothing is turned on
    gate, passed    the gate stands in front of PyTorch's operators, and passes the call on
    gate, replaced  the gate finds a kernel in place of PyTorch's, which does nothing

So what is measured is the way to a kernel, with the output's allocation. PyTorch's own call contains its kernel. A
backward call computes the gradients of input and weight.
"""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch

from bench.tools.results import save_run
from bench.tools.script import out_of, run_main, verdict
from bench.torch.measuring import built_gate, conditions, device_of, torch_command_line
from bench.torch.overhead import sample_us
from ucudnn.torch.gate.call_gate import CallGate, GateOutput, GateRule, signature_of

CALLS = 50  # so few that most samples are not interrupted by other processes
MOST_PASSED_US = 3.0
MOST_REPLACED_US = 5.0


class Nothing:
    """A kernel that computes nothing, so that only the way to it takes time."""

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
        forward = signature_of((*parts[4:], None, geometry, *flags, cudnn.allow_tf32))
        precision = torch._C._get_fp32_precision_getter("cuda", "conv")
        backward = signature_of((*parts, geometry, (True, True, False), *flags, precision))
        return GateRule(forward, {0: out}), GateRule(backward, {0: near, 1: filters})


def _look(tensor: torch.Tensor) -> Sequence[Any]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, max(0, tensor.get_device())


def _output(tensor: torch.Tensor, kernel: Nothing) -> GateOutput:
    return GateOutput(kernel.run_at, tuple(tensor.shape), tensor.stride())


def measured(gate: CallGate, calls: Calls, device: torch.device, samples: int) -> dict[str, Any]:
    """Return the microseconds of both calls in each way, and their quartiles."""
    known, others = calls.rules(), Calls(device)
    others.x = others.grad = torch.randn(1, 1, 5, 4, device=device)
    unknown = others.rules()

    def opened(rules: tuple[GateRule, GateRule]) -> None:
        gate.use(device.type, rules[:1], rules[1:])

    ways: dict[str, Callable[[], object]] = {
        "pytorch": lambda: None,
        "gate, passed": partial(opened, unknown),
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
        found[name] = {
            way: {"us": median(times), "quartiles_us": [quantiles(times)[at] for at in (0, 2)]}
            for way, times in taken.items()
        }
        print(f"{name:9}" + "".join(f"  {way} {each['us']:.2f} us" for way, each in found[name].items()), flush=True)
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
    save_run(out_of(arguments), {"conditions": conditions(device), "calls_us": found, "required": required})


if __name__ == "__main__":
    run_main(main)
