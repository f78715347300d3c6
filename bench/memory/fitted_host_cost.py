"""Time of the host for each operation of a fitted step, beside eager PyTorch: the price of running a memory plan.

    python -m bench.memory.fitted_host_cost     # on a CPU, with one thread: two minutes

Networks are so narrow that the time of a step is the host's. Forward and backward run in turns, eager and by plans of
three policies; the least processor time of many steps counts. What a fitted step takes beyond the eager one is divided
by the actions that its plan issues: operations, those that run again, and copies. Their own work is included, so
recomputation and copies look dearer than the host's part of them is.
"""

from collections.abc import Callable
from time import process_time

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from bench.memory.models import GPT, DenseNet
from bench.tools.results import save
from bench.tools.script import command_line, out_of, run_main, verdict
from bench.torch.measuring import conditions
from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.torch.execution.fit import fit

POLICIES = ("stock", "checkpoint", "vdnn-ext-all-p")
COUNTED = (ActionKind.RUN, ActionKind.RECOMPUTE, ActionKind.OFFLOAD, ActionKind.PREFETCH)
MOST_US = 3.0


def networks() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    """Return narrow networks with inputs and targets."""
    layers: list[nn.Module] = []
    for _ in range(100):
        layers += [nn.Linear(4, 4), nn.ReLU()]
    tokens = torch.randint(8, (1, 4))
    return {
        "200 layers": (nn.Sequential(*layers), (torch.randn(2, 4), torch.randint(4, (2,)))),
        "GPT": (GPT(12, 16, 2, length=4, vocabulary=8), (tokens, tokens)),
        "DenseNet": (DenseNet(2, (6, 12, 6), 4), (torch.randn(2, 3, 32, 32), torch.randint(1000, (2,)))),
    }


def fastest(works: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Return the least processor time of each in microseconds; they take turns."""
    found = dict.fromkeys(works, float("inf"))
    for _ in range(runs):
        for name, work in works.items():
            begin = process_time()
            work()
            found[name] = min(found[name], (process_time() - begin) * 1e6)
    return found


def measure(name: str, model: nn.Module, inputs: tuple[Tensor, ...], runs: int) -> list[dict[str, float | str]]:
    """Return a row for each policy."""

    def eager() -> None:
        F.cross_entropy(model(*inputs[:-1]), inputs[-1]).backward()
        model.zero_grad()

    works: dict[str, Callable[[], object]] = {"eager": eager}
    actions = {}
    for policy in POLICIES:
        step = fit(model, inputs, loss=F.cross_entropy, policy=policy)
        actions[policy] = sum(kind in COUNTED for kind, _ in step.plan.actions)

        def fitted(step: nn.Module = step) -> None:
            step(*inputs).backward()
            model.zero_grad()

        for _ in range(3):
            fitted()
        works[policy] = fitted
    eager()
    times = fastest(works, runs)
    return [
        {
            "network": name,
            "policy": policy,
            "actions": actions[policy],
            "eager_us": times["eager"],
            "fitted_us": times[policy],
            "us_each": (times[policy] - times["eager"]) / actions[policy],
        }
        for policy in POLICIES
    ]


def main() -> bool:
    """Measure, print and save."""
    parser = command_line(__doc__, "bench.memory.fitted_host_cost", "memory/fitted_host_cost.json")
    parser.add_argument("--runs", type=int, default=150, help="steps of each kind (%(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    print(f"{'network':12}{'policy':16}{'actions':>9}{'eager µs':>11}{'fitted µs':>11}{'µs each':>9}")
    for name, (model, inputs) in networks().items():
        for row in measure(name, model, inputs, arguments.runs):
            numbers = f"{row['actions']:9}{row['eager_us']:11.0f}{row['fitted_us']:11.0f}{row['us_each']:9.2f}"
            print(f"{row['network']:12}{row['policy']:16}{numbers}", flush=True)
            rows.append(row)
    dearest = max(float(row["us_each"]) for row in rows)
    found = verdict("host time of an action beyond eager's operation", dearest, MOST_US, " µs")
    save(out_of(arguments), {"conditions": conditions(torch.device("cpu")), "rows": rows, "verdict": found})
    return bool(found["met"])


if __name__ == "__main__":
    run_main(main)
