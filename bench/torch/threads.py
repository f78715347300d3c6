"""Do NumPy's threads fight PyTorch's? Times a training step of a small U-Net on CPUs, in three ways, in turn.

    python -m bench.torch.threads

Ways: PyTorch alone; ucudnn with backend 'cpu', whose BLAS then has one thread; and the same with all threads of the
BLAS, as it was before. ucudnn's NumPy is slower than PyTorch's own kernels. With one thread it must not be slower than
with all. Run it on an idle machine.
"""

from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from bench.tools.results import save
from bench.tools.script import command_line, note, run_main, verdict
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.backends.cpu.blas_threads import can_limit
from ucudnn.handle import Handle
from ucudnn.torch import turn_on
from ucudnn.torch.calls.interceptor import Interceptor
from ucudnn.torch.overrides import process_overrides

ALONE, ONE, ALL = "PyTorch alone", "ucudnn, one thread", "ucudnn, all threads"
THREADS = {ONE: 1, ALL: None}


class UNet(torch.nn.Module):
    """Two levels down and up again, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU())
        self.low = torch.nn.Sequential(
            *(torch.nn.MaxPool2d(2), torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU()),
            *(torch.nn.Conv2d(32, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.ConvTranspose2d(32, 16, 2, stride=2)),
        )
        self.out = torch.nn.Conv2d(32, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the network."""
        skip = self.down(x)
        return self.out(torch.cat([skip, self.low(skip)], dim=1))


def main() -> bool:
    """Run the script; return whether one thread is at least as fast as all."""
    parser = command_line(__doc__, "bench.torch.threads", "torch/threads.json")
    parser.add_argument("--steps", type=int, default=21, help="steps of each way (%(default)s)")
    arguments = parser.parse_args()
    model, x = UNet(), torch.randn(4, 3, 64, 64)
    process_overrides.use(None)
    aten = process_overrides.aten_kernels("cpu")
    ways = {name: Interceptor(partial(_handle, count), "cpu", aten) for name, count in THREADS.items()}
    times: dict[str, list[float]] = {ALONE: [], ONE: [], ALL: []}
    for name in ways:
        with turn_on(ways[name]):
            _step_ms(model, x)  # plans
    for _ in range(arguments.steps):
        times[ALONE].append(_step_ms(model, x))
        for name, interceptor in ways.items():
            with turn_on(interceptor):
                times[name].append(_step_ms(model, x))
    medians = {name: median(found) for name, found in times.items()}
    for name, found in medians.items():
        note(f"{name}: {found:.1f} ms")
    verdicts = [verdict("one thread over all threads", medians[ONE] / medians[ALL], 1.1)]
    record: dict[str, Any] = {
        "conditions": {"torch": torch.__version__, "numpy": np.__version__, "threads": torch.get_num_threads()},
        "limits_threads": can_limit(),
        "median_ms": medians,
        "steps_ms": times,
        "verdicts": verdicts,
    }
    save(arguments.out or arguments.default_out, record)
    return all(each["met"] for each in verdicts)


def _handle(threads: int | None, _: object = None) -> Handle:
    return Handle(backend=CpuBackend(threads=threads), workspace_limit="4MiB", database="off")


def _step_ms(model: torch.nn.Module, x: torch.Tensor) -> float:
    begin = perf_counter()
    model.zero_grad()
    model(x).square().mean().backward()
    return (perf_counter() - begin) * 1e3


if __name__ == "__main__":
    run_main(main)
