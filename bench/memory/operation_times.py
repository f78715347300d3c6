"""Times of a training step's operations, measured on a GPU and by the device profile 'h200', by kind of operation.

    python -m bench.memory.operation_times                  # on a GPU: six steps, about two minutes on an H200
    python -m bench.memory.operation_times gpt2             # some of them
    python -m bench.memory.operation_times --backend cpu    # tries the script out on small steps

Each step is recorded on the GPU with measured times, twice: with TF32 in matrix products (`--matmul tf32`), and without
it as is PyTorch's default. A profile predicts well where both sums are near for every kind.
"""

import gc
import os
from argparse import Namespace
from collections import defaultdict
from typing import Any

import torch

from bench.memory.peaks import BATCHES, recipe_of
from bench.tools.results import save
from bench.tools.script import add_backend, add_names, command_line, note, out_of, run_main
from bench.torch.measuring import conditions, device_of
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.torch.measuring.measure import measure
from ucudnn.memory.torch.measuring.training_step import make_step
from ucudnn.memory.torch.record import trace_step

PRECISIONS = {"fma": "highest", "tf32": "high"}
"""PyTorch's names of how float32 is multiplied outside of convolutions."""

_SHOWN = 8


def times_of(name: str, arguments: Namespace, device: torch.device) -> dict[str, Any]:
    """Return measured and predicted milliseconds of one step, in all and by kind of operation."""
    recipe = recipe_of(name, arguments)
    step = make_step(recipe, device)
    traced = trace_step(step, name, recipe.batch, recipe.variant.math, recipe.conditions())
    measured = measure(step, traced, repeats=3).time_ms
    predicted = device_costs(load_device("h200"), traced.graph).time_ms
    kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for operation, real, model in zip(traced.graph.operations, measured, predicted, strict=True):
        found = kinds[f"{operation.kind.removeprefix('aten.')} ({operation.phase.value})"]
        found[0] += real
        found[1] += model
        found[2] += 1
    ordered = sorted(kinds.items(), key=lambda item: -abs(item[1][0] - item[1][1]))
    return {
        "batch": recipe.batch,
        "measured_ms": sum(measured),
        "predicted_ms": sum(predicted),
        "kinds": {kind: {"measured_ms": a, "predicted_ms": b, "operations": int(n)} for kind, (a, b, n) in ordered},
    }


def run(arguments: Namespace) -> None:
    """Measure all steps, and write the results after each one."""
    device = device_of(arguments)
    answer: dict[str, Any] = {"conditions": conditions(device), "cases": {}}
    for name in arguments.names or BATCHES:
        for math in arguments.matmul or PRECISIONS:
            torch.set_float32_matmul_precision(PRECISIONS[math])
            note(f"measuring {name}, matrix products with {math}")
            found = times_of(name, arguments, device)
            gc.collect()
            torch.cuda.empty_cache()
            answer["cases"][f"{name} {math}"] = found
            print(
                f"{name:13}{math:5} measured {found['measured_ms']:8.1f} ms  predicted {found['predicted_ms']:8.1f} ms"
            )
            for kind, each in [*found["kinds"].items()][:_SHOWN]:
                print(f"  {each['measured_ms']:8.2f} {each['predicted_ms']:8.2f}  {each['operations']:4} x {kind}")
            save(out_of(arguments), answer)


def main() -> None:
    """Measure the steps that are named, or all."""
    os.environ.setdefault("TORCH_SYMBOLIZE_MODE", "dladdr")
    parser = command_line(__doc__, "bench.memory.operation_times", "memory/operation_times.json")
    add_names(parser, BATCHES)
    parser.add_argument("--matmul", action="append", choices=PRECISIONS, help="may be repeated; default: both")
    add_backend(parser)
    arguments = parser.parse_args()
    run_main(lambda: run(arguments))


if __name__ == "__main__":
    main()
