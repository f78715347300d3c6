"""Peaks and times of training steps: PyTorch's own beside those of the recorded and of the shipped steps.

    python -m bench.memory.peaks                  # on a GPU: six steps, about 6 minutes on an H200
    python -m bench.memory.peaks gpt2 unet3d      # some of them
    python -m bench.memory.peaks --backend cpu    # tries the script out on small steps

Each step trains on the GPU as PyTorch does. Its peak is `torch.cuda.max_memory_allocated`, and PyTorch's memory history
says which operator allocated at the peak. Beside it stand the peak of the same step recorded on the GPU with measured
scratch, the peak of the step that ships, which was recorded without a GPU, and the time by the device profile 'h200'.
What libraries keep allocated beside the tensors, such as cuBLAS's workspace, is added to the simulated peaks and shown.
"""

import gc
import os
from argparse import Namespace
from dataclasses import replace
from statistics import median
from time import perf_counter
from traceback import format_exc
from typing import Any

import torch

from bench.memory.record_steps import RECIPES
from bench.tools.results import save
from bench.tools.script import add_backend, add_names, command_line, note, out_of, run_main, verdict
from bench.torch.measuring import conditions, device_of
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.step.shipped import open_step
from ucudnn.memory.torch.measuring.measure import measure
from ucudnn.memory.torch.measuring.measured_peak import library_bytes, measured_peak
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe, TrainingStep, make_step
from ucudnn.memory.torch.record import trace_step

GIB = 2**30
BATCHES = {"resnet50": 256, "vgg16_bn": 128, "inception_v3": 128, "densenet121": 128, "unet3d": 4, "gpt2": 8}
SMALL = {
    "resnet50": (2, (3, 64, 64)),
    "vgg16_bn": (2, (3, 32, 32)),
    "inception_v3": (2, (3, 299, 299)),
    "densenet121": (2, (3, 64, 64)),
    "unet3d": (1, (1, 16, 16, 16)),
    "gpt2": (1, (16,)),
}


def step_ms(step: TrainingStep, runs: int) -> float:
    """Return the median time of steps in milliseconds, after two that do not count."""
    times = []
    for _ in range(runs + 2):
        step.clear()
        _wait(step)
        begin = perf_counter()
        step.run()
        _wait(step)
        times.append((perf_counter() - begin) * 1e3)
    return median(times[2:])


def _wait(step: TrainingStep) -> None:
    if step.input_tensors()[0].device.type == "cuda":
        torch.cuda.synchronize()


def place(graph: StepGraph, costs: Costs) -> dict[str, Any]:
    """Return the simulated peak of a step and where it is."""
    liveness = measure_liveness(graph, costs)
    operation = graph.operations[liveness.order[liveness.peak_place]]
    return {
        "peak_bytes": liveness.peak_bytes,
        "scratch_bytes": liveness.scratch_bytes[liveness.peak_place],
        "largest_scratch_bytes": max(liveness.scratch_bytes),
        "floor_bytes": liveness.floor_bytes,
        "operator": operation.kind.removeprefix("aten."),
        "source": operation.source,
        "layer": operation.module,
        "time_ms": sum(costs.time_ms),
    }


def compare(name: str, recipe: TrainingRecipe, device: torch.device, runs: int) -> dict[str, Any]:
    """Return what PyTorch and what the recorded step say of one step."""
    step = make_step(recipe, device)
    answer: dict[str, Any] = {"batch": recipe.batch, "conditions": recipe.conditions()}
    answer["step_ms"] = step_ms(step, runs)
    real = measured_peak(step)
    held = library_bytes(step)
    answer["pytorch"] = {"peak_bytes": real.bytes, "operator": real.operator, "source": real.source}
    answer["pytorch"] |= {"library_bytes": held}
    traced = trace_step(step, name, recipe.batch, recipe.variant.math, recipe.conditions())
    answer["recorded"] = place(traced.graph, measure(step, traced, repeats=3))
    del step, traced
    if recipe == RECIPES[name] or device.type == "cuda":
        shipped = open_step(name).with_batch(recipe.batch)
        answer["shipped"] = place(shipped, device_costs(load_device("h200"), shipped))
    for kind in ("recorded", "shipped"):
        if kind in answer:
            off = answer[kind]["peak_bytes"] + held - real.bytes
            answer[kind]["error"] = off / real.bytes
            answer[kind]["error_beyond_scratch"] = max(0, abs(off) - answer[kind]["scratch_bytes"]) / real.bytes
    return answer


def show(name: str, answer: dict[str, Any]) -> None:
    """Print the comparison of one step."""
    real, recorded, shipped = answer["pytorch"], answer["recorded"], answer.get("shipped")
    line = f"{name:13}{answer['batch']:5}  PyTorch {real['peak_bytes'] / GIB:7.3f} GiB {answer['step_ms']:8.1f} ms"
    line += f"  recorded {recorded['error']:+7.2%} {recorded['time_ms']:8.1f} ms"
    print(line + (f"  shipped {shipped['error']:+7.2%} {shipped['time_ms']:8.1f} ms" if shipped else ""))
    print(f"  PyTorch's peak is in {real['operator'] or 'unknown'} at {real['source'] or 'an unknown line'},")
    print(f"  the recorded step's in {recorded['operator']} at {recorded['source']} ({recorded['layer']})", flush=True)


def recipe_of(name: str, arguments: Namespace) -> TrainingRecipe:
    """Return what is trained."""
    if arguments.backend == "cpu":
        batch, shape = SMALL[name]
        return replace(RECIPES[name], batch=batch, shape=shape)
    return replace(RECIPES[name], batch=BATCHES[name])


def run(arguments: Namespace) -> bool:
    """Compare all steps, and write the results after each one; return whether all are within one percent."""
    device = device_of(arguments)
    answer: dict[str, Any] = {"conditions": conditions(device), "cases": {}}
    failed = False
    for name in arguments.names or BATCHES:
        note(f"training {name}")
        try:
            found = compare(name, recipe_of(name, arguments), device, arguments.steps)
        except (
            RuntimeError,
            MemoryError,
            ValueError,
            KeyError,
            TypeError,
        ):  # the other steps are compared all the same
            note(format_exc())
            failed = True
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        show(name, found)
        answer["cases"][name] = found
        save(out_of(arguments), answer)
    for kind in ("recorded", "shipped"):
        cases = {name: found[kind] for name, found in answer["cases"].items() if kind in found}
        if cases:
            worst = max(cases, key=lambda name: cases[name]["error_beyond_scratch"])
            error = cases[worst]["error_beyond_scratch"] * 100
            row = verdict(f"largest error of a {kind} step's peak beyond its scratch ({worst})", error, 1.0, " %")
            answer.setdefault("required", []).append(row)
    others = [name for name, found in answer["cases"].items() if not same_place(found)]
    row = verdict(f"steps whose operator or line at the peak is not PyTorch's ({', '.join(others)})", len(others), 0)
    answer.setdefault("required", []).append(row)
    save(out_of(arguments), answer)
    return not failed


def same_place(answer: dict[str, Any]) -> bool:
    """Return whether the recorded step names the operator and the line that PyTorch's own tools show at the peak."""
    return all(answer["recorded"][key] == answer["pytorch"][key] for key in ("operator", "source"))


def main() -> None:
    """Compare the steps that are named, or all."""
    os.environ.setdefault("TORCH_SYMBOLIZE_MODE", "dladdr")  # names of operators in PyTorch's memory history, quickly
    parser = command_line(__doc__, "bench.memory.peaks", "memory/peaks.json")
    add_names(parser, BATCHES)
    parser.add_argument("--steps", type=int, default=5, help="timed steps (%(default)s)")
    add_backend(parser)
    arguments = parser.parse_args()
    run_main(lambda: run(arguments))


if __name__ == "__main__":
    main()
