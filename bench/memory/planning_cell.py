"""What planning one step takes the checkout of ucudnn that is on the path: one line of JSON.

Not a script of its own: `bench.memory.planning` runs it for each cell. It imports nothing of bench, because it measures
older checkouts, too, whose modules have other names.
"""

import json
import resource
import sys
from importlib import import_module
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np  # noqa: F401  # importing it is no planning; a program that fits has it

_SPARED = 0.015  # share of the allocator's room that a fitted step leaves


def _module(*names: str) -> Any:
    """Return the first module that this checkout has."""
    for name in names:
        try:
            return import_module(f"ucudnn.memory.{name}")
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(f"this checkout has no ucudnn.memory.{' and no '.join(names)}")


def planned(step: str, share: float, policy: str) -> dict[str, Any]:
    """Plan a recorded step within a budget and an allocator's room, as `fit` does on a GPU, with costs of an H200.

    Args:
        step: a shipped step, or a file.
        share: where the budget lies between floor and peak, or a share of the peak where it is negative.
        policy: name of a policy, or 'auto'.
    """
    make_plan = _module("planner.planner", "policies.choice").make_plan
    least_plan = _module("planner.least", "policies.choice").least_plan
    headroom = _module("allocator.headroom", "pools.allocator_room").AllocatorRoom
    graph = _module("step.shipped", "steps").open_step(step)
    costs = _module("devices.roofline").device_costs(_module("devices.profile").load_device("h200"), graph)
    simulate = _module("simulation.simulator").simulate
    live = _module("step.liveness", "liveness").measure_liveness(graph, costs)
    floor, peak = live.floor_bytes, live.peak_bytes
    budget = int(-share * peak) if share < 0 else int(floor + share * (peak - floor))
    room = "tensor_bytes" if "tensor_bytes" in headroom.__dataclass_fields__ else "most_bytes"
    found: dict[str, Any] = {"operations": len(graph.operations), "budget": budget, "before_bytes": _most_bytes()}
    began, cpu, plan = perf_counter(), process_time(), None
    frugal = least_plan(graph, costs, policy)
    within = headroom(**{room: budget}, spare_bytes=int(budget * _SPARED), frugal=frugal)
    try:
        plan = make_plan(graph, costs, budget, policy, within)
    except Exception as error:  # noqa: BLE001  # a refusal takes its time, too
        found["reason"] = f"{type(error).__name__}: {error}"
    found |= {"cpu_s": process_time() - cpu, "seconds": perf_counter() - began, "most_bytes": _most_bytes()}
    return found if plan is None else {**found, "policy": plan.policy, "step_ms": simulate(plan, costs).step_ms}


def _most_bytes() -> int:
    """Return the most memory of this program; `ru_maxrss` would count the process that it was forked from."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def main() -> None:
    """Plan as the arguments say, and print what it took."""
    asked = json.loads(sys.argv[1])
    most_s = asked.pop("most_cpu_s")
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s + 1))
    print(json.dumps(planned(**asked)))
