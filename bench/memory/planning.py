"""Plans for a whole training step, on a CPU: how long policies, the simulator and pools take, and what they predict.

    python -m bench.memory.planning

The steps are those that ship with ucudnn, with the costs of an H200, and a residual network of 2,000 operations. A
simulation of the latter must take at most 50 ms, a policy at most 1 s. Times are wall-clock times on this machine:
medians and extremes of repeated runs. `waste` is the share by which a pool is larger than the bytes alive at most.
"""

from functools import partial
from typing import Any

from bench.paper.planning import timed_ms
from bench.tools.results import cpu_conditions, json_text, save
from bench.tools.script import command_line, out_of, run_main, verdict
from ucudnn.errors import BudgetError
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.catalog import POLICIES, MemoryPolicy
from ucudnn.memory.pools.best_fit import BestFitPool
from ucudnn.memory.pools.placement import Pool
from ucudnn.memory.pools.planned import PlannedPool
from ucudnn.memory.pools.two_ended import TwoEndedPool, mobility_in
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import Affine, Phase, Role, StepGraph, StepOperation, Storage
from ucudnn.memory.step.liveness import measure_liveness
from ucudnn.memory.step.shipped import open_step, shipped_steps

SHARES = (0.8, 0.6, 0.4)
"""Budgets that are asked of policies which can keep less than the step's peak, as shares of the peak."""

MOST_SIMULATION_MS, MOST_POLICY_MS = 50.0, 1000.0


class ResidualStep:
    """A residual network of convolution, normalization and ReLU in place, with every second output added to a skip."""

    def __init__(self, layers: int) -> None:
        """Write the operations: three forward and three backward for each layer."""
        self.storages: dict[str, Storage] = {}
        self.operations: list[StepOperation] = []
        self._add("x", Role.INPUT)
        for layer in range(layers):
            self._forward(layer)
        self._run("turn", Phase.BACKWARD, [f"y{layers - 1}"], ["dy"])
        for layer in reversed(range(layers)):
            self._backward(layer)

    def graph(self) -> StepGraph:
        """Return the step."""
        return StepGraph(
            name="residual", batch=16, operations=tuple(self.operations), storages=tuple(self.storages.values())
        )

    def _forward(self, layer: int) -> None:
        x, y = f"y{layer - 1}" if layer else "x", f"y{layer}"
        self._add(f"w{layer}", Role.PARAMETER)
        self._add(f"running{layer}", Role.BUFFER)
        self._run(f"conv{layer}", Phase.FORWARD, [x, f"w{layer}"], [f"c{layer}"])
        self._run(
            f"norm{layer}", Phase.FORWARD, [f"c{layer}", f"running{layer}"], [y, f"mean{layer}", f"running{layer}"]
        )
        skip = [f"y{layer - 2}"] if layer > 1 and layer % 2 else []
        self._run(f"relu{layer}", Phase.FORWARD, [y, *skip], [y])

    def _backward(self, layer: int) -> None:
        x, dy = f"y{layer - 1}" if layer else "x", f"d{layer + 1}" if f"d{layer + 1}" in self.storages else "dy"
        self._add(f"dw{layer}", Role.GRADIENT)
        self._run(f"relu{layer}_backward", Phase.BACKWARD, [dy, f"y{layer}"], [f"r{layer}"])
        self._run(f"norm{layer}_backward", Phase.BACKWARD, [f"r{layer}", f"c{layer}", f"mean{layer}"], [f"n{layer}"])
        self._run(f"conv{layer}_backward", Phase.BACKWARD, [f"n{layer}", x, f"w{layer}"], [f"d{layer}", f"dw{layer}"])

    def _add(self, name: str, role: Role) -> None:
        size = Affine(0, 2**20) if role in (Role.ACTIVATION, Role.INPUT) else Affine(2**16)
        self.storages.setdefault(name, Storage(name=name, role=role, size=size))

    def _run(self, name: str, phase: Phase, reads: list[str], writes: list[str]) -> None:
        for written in writes:
            self._add(written, Role.ACTIVATION)
        rows = {each: row for row, each in enumerate(self.storages)}
        self.operations.append(
            StepOperation(
                name=name,
                kind=name.rstrip("0123456789"),
                phase=phase,
                reads=tuple(sorted(rows[each] for each in reads)),
                writes=tuple(sorted(rows[each] for each in writes)),
            )
        )


def residual_step(operations: int) -> tuple[StepGraph, Costs]:
    """Return a step of at least this many operations, and costs of 1 ms for each."""
    graph = ResidualStep(-(-operations // 6)).graph()
    count = len(graph.operations)
    costs = Costs(
        device="even",
        time_ms=(1.0,) * count,
        scratch_bytes=(0,) * count,
        offload_bytes_per_ms=5e7,
        prefetch_bytes_per_ms=5e7,
        memory_bytes=2**40,
    )
    return graph, costs


def plan_case(policy: MemoryPolicy, graph: StepGraph, costs: Costs, budget: int | None) -> dict[str, Any]:
    """Time a policy, and the simulation and the placement of its plan; return what they predict, too."""
    try:
        plan = policy.plan(graph, costs, budget)
    except BudgetError as error:
        return {"needs_bytes": error.required_bytes}
    result = simulate(plan, costs)
    return {
        "peak_bytes": result.peak_bytes,
        "time_ms": result.time_ms,
        "recompute_ms": result.recompute_ms,
        "policy": timed_ms(partial(policy.plan, graph, costs, budget)),
        "simulation": timed_ms(partial(simulate, plan, costs)),
        "pools": placements(plan, costs),
    }


def placements(plan: MemoryPlan, costs: Costs) -> dict[str, object]:
    """Return what each pool wastes for a plan; how long planned placement takes, too."""
    lifetimes = simulate(plan, costs).lifetimes
    pools: dict[str, Pool] = {
        "best_fit": BestFitPool(),
        "two_ended": TwoEndedPool(mobility_in(plan)),
        "planned": PlannedPool(),
    }
    wasted = {name: pool.place(lifetimes).waste for name, pool in pools.items()}
    return {"waste": wasted, "planned": timed_ms(partial(pools["planned"].place, lifetimes))}


def step_case(graph: StepGraph, costs: Costs) -> dict[str, Any]:
    """Return the figures of a step: its peak and floor, and each policy's plans without and within budgets."""
    liveness = measure_liveness(graph, costs)
    cases = {name: plan_case(policy, graph, costs, None) for name, policy in POLICIES.items()}
    for share in SHARES:
        budget = int(share * liveness.peak_bytes)
        cases[f"checkpoint within {share:.0%}"] = plan_case(POLICIES["checkpoint"], graph, costs, budget)
    return {
        "operations": len(graph.operations),
        "batch": graph.batch,
        "peak_bytes": liveness.peak_bytes,
        "floor_bytes": liveness.floor_bytes,
        "plans": cases,
    }


def main() -> bool:
    """Measure everything, print it and write it; return whether the simulator and the policies are fast enough."""
    arguments = command_line(__doc__, __spec__.name, "memory/planning.json").parse_args()
    device = load_device("h200")
    steps = {name: (graph := open_step(name), device_costs(device, graph)) for name in shipped_steps()}
    steps["residual"] = residual_step(2000)
    cases = {name: step_case(*step) for name, step in steps.items()}
    save(out_of(arguments), {"conditions": cpu_conditions("ucudnn"), "steps": cases})
    print(json_text(cases))
    timed = [plan for case in cases.values() for plan in case["plans"].values() if "policy" in plan]
    simulation = max(plan["simulation"]["median_ms"] for plan in cases["residual"]["plans"].values())
    policy = max(plan["policy"]["median_ms"] for plan in timed)
    verdicts = (
        verdict("simulation of 2,000 operations", simulation, MOST_SIMULATION_MS, " ms"),
        verdict("slowest policy", policy, MOST_POLICY_MS, " ms"),
    )
    return all(each["met"] for each in verdicts)


if __name__ == "__main__":
    run_main(main)
