"""Measures what convolutions take the host longer in a network that is tuned, by many short turns in one process.

    python -m bench.torch.programs.host_turns                         ResNet-50, a minute after it was tuned
    python -m bench.torch.programs.host_turns --way passed --batch 16
    python -m bench.torch.programs.host_turns --network regnety_032 --form last --way 64MiB --tuning-seconds 120
    python -m bench.torch.programs.host_turns --backend cpu --network small --way passed --seconds 2

A host is faster at times, for seconds, by far more than what is asked. So in each turn a single step is issued, part by
part, to an idle GPU, and turns of PyTorch alone alternate with those of

    passed      the gate stands in front of PyTorch's operators, and passes each call on; nothing else is turned on
    SETTING     of bench.torch.network_cell, after all is settled

Each turn is compared with the mean of PyTorch's turns before and after it. The answer is the median over all turns for
each convolution and gradient, with its quartiles and the standard error of the median. What a call takes the host does
not depend on the mini-batch: with a smaller one more turns fit into the same time. Plans do depend on it, and a program
that its host bounds is left alone, so a setting is best measured with the network's own mini-batch.

The script ends with status 1 if a call takes the host longer than it may: 3 us where it is passed on, 5 us otherwise.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import fmean, median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import torch

import ucudnn.torch
from bench.tools.results import save_case
from bench.tools.script import commit_of, note, out_of, run_main, verdict
from bench.torch.measuring import built_gate, conditions, device_of
from bench.torch.network_setting import is_settled, turned_on
from bench.torch.network_step import NETWORKS, Step, step_of
from bench.torch.network_times import Clock, host_ms
from bench.torch.programs.command_line import network_command_line
from ucudnn.torch.gate.call_gate import CallGate, GateOutput, GateRule
from ucudnn.torch.overrides import process_overrides

PASSED = "passed"
MOST_PASSED_US = 3.0
MOST_US = 5.0
_MEDIANS_ERROR = 1.2533 / 1.349
"""The standard error of a median of normal values, over their quartiles' distance and the root of their number."""


class Way(NamedTuple):
    """A way in which convolutions go, which is turned on before a step and off after it."""

    on: Callable[[], object]
    off: Callable[[], object]


@contextmanager
def mini_batch(network: str, batch: int) -> Iterator[None]:
    """Return a context in which a network is trained with another mini-batch."""
    source, usual, shape = NETWORKS[network]
    NETWORKS[network] = source, batch, shape
    try:
        yield
    finally:
        NETWORKS[network] = source, usual, shape


def passing(gate: CallGate, device: torch.device) -> Way:
    """Return the way of calls that the gate passes on, because it knows only a convolution that no program has."""

    def never(*_: int) -> bool:
        raise RuntimeError("no call looks like this")

    rules = [GateRule([0], {0: GateOutput(never, (1,), (1,))})]
    return Way(partial(gate.open, device.type, rules, rules), gate.close)


def enabled(arguments: Namespace, database: Path) -> "ucudnn.torch.Enabled":
    """Turn a setting on.

    Raises:
        SystemExit: if it is PyTorch alone.
    """
    on = turned_on(arguments.way, arguments.backend, str(database))
    if on is None:
        raise SystemExit(f"error: --way {arguments.way} turns nothing on")
    return on


def tune(on: "ucudnn.torch.Enabled", step: Step, clock: Clock, seconds: float) -> None:
    """Take steps until nothing is tried any more.

    Raises:
        SystemExit: if that takes longer than these seconds.
    """
    begin = perf_counter()
    step()  # a program has nothing that could be tried before its first step
    while not is_settled(on):
        if perf_counter() - begin > seconds:
            raise SystemExit(f"error: not settled after --tuning-seconds {seconds:g}: give more")
        step()
    clock.wait()


def turns(way: Way, step: Step, clock: Clock, seconds: float) -> tuple[list[float], list[float]]:
    """Return the host's milliseconds of a step in each turn, and in PyTorch's turns, one of which is more."""

    def turn() -> float:
        step()  # PyTorch's dispatcher looks operators up anew after a change
        return sum(host_ms(step, clock, 1).values())

    ours: list[float] = []
    stock = [turn()]
    begin = perf_counter()
    while len(ours) < 2 or perf_counter() - begin < seconds:
        way.on()
        ours.append(turn())
        way.off()
        stock.append(turn())
    return ours, stock


def over_us(ours: Sequence[float], stock: Sequence[float], kernels: int) -> dict[str, Any]:
    """Return by how many microseconds each convolution and gradient takes the host longer.

    Args:
        ours: milliseconds of a step, by turns with those of PyTorch.
        stock: those of PyTorch, one more.
        kernels: convolutions and gradients of a step.
    """
    over = [(each - fmean(around)) * 1e3 / kernels for each, around in zip(ours, pairwise(stock), strict=True)]
    low, middle, high = quantiles(over, n=4)
    error = _MEDIANS_ERROR * (high - low) / sqrt(len(over))
    return {"over_us": middle, "error_us": error, "quartiles_us": [low, high], "turns": len(over)}


def measure(arguments: Namespace) -> dict[str, Any]:
    """Measure one way of a network, and return what is kept.

    Raises:
        SystemExit: if there is no gate, or the network is not tuned in time.
    """
    device = device_of(arguments)
    batch = arguments.batch or NETWORKS[arguments.network][1]
    with TemporaryDirectory(prefix="ucudnn-host-turns-") as folder:
        # a setting sets cudnn.benchmark, which would change nothing after the first step
        on = None if arguments.way == PASSED else enabled(arguments, Path(folder) / "database.sqlite")
        with mini_batch(arguments.network, batch):
            (step, kernels), clock = step_of(arguments, device), Clock(device)
        found: dict[str, Any] = {"batch": batch, "kernels": kernels}
        if on is None:
            step()
            way = passing(built_gate(), device)
        else:
            tune(on, step, clock, arguments.tuning_seconds)
            found["tuned"] = [each.to_dict() for each in on.report().tuned]
            found["gated"] = process_overrides.is_gated(device.type)
            interceptor = on._interceptor
            process_overrides.use(None)
            way = Way(partial(process_overrides.use, interceptor), partial(process_overrides.use, None))
        ours, stock = turns(way, step, clock, arguments.seconds)
        if on is not None:
            process_overrides.use(interceptor)
            ucudnn.torch.disable()
    found |= over_us(ours, stock, kernels) | {"ours_ms": median(ours), "stock_ms": median(stock)}
    return {"commit": commit_of(arguments), "conditions": conditions(device), **found}


def told(found: Mapping[str, Any]) -> str:
    """Return a line about what was replaced and how sure the answer is."""
    kernels = sum(len(each["kernels"]) for each in found.get("tuned", ()))
    replaced = "" if "tuned" not in found else f"{kernels} kernels replaced{'' if found['gated'] else ', no gate'}; "
    times = f"a step takes the host {found['ours_ms']:.2f} ms, PyTorch {found['stock_ms']:.2f} ms"
    low, high = found["quartiles_us"]
    sure = f"quartiles {low:.1f} and {high:.1f} us, standard error {found['error_us']:.1f} us"
    return f"{replaced}{times}; {found['turns']} turns, {sure}"


def main() -> bool:
    """Measure, print and write."""
    arguments = _parser().parse_args()
    found = measure(arguments)
    note(told(found))
    most = MOST_PASSED_US if arguments.way == PASSED else MOST_US
    name = f"{arguments.network} {arguments.form} {arguments.way}"
    claim = verdict(f"{name}: each convolution and gradient, over PyTorch's", found["over_us"], most, " us")
    save_case(out_of(arguments), name, {**found, "claims": [claim]})
    return bool(claim["met"])


def _parser() -> ArgumentParser:
    parser = network_command_line(__doc__, __spec__.name, form="nchw")
    parser.add_argument(
        "--way", default="auto", help=f"{PASSED}, or a setting of bench.torch.network_cell (%(default)s)"
    )
    parser.add_argument("--batch", type=int, help="images of a step (those of the network)")
    parser.add_argument("--seconds", type=float, default=60, help="of all turns (%(default)s)")
    parser.add_argument("--tuning-seconds", type=float, default=90, help="most seconds of tuning (%(default)s)")
    return parser


if __name__ == "__main__":
    run_main(main)
