"""What the papers' methods are worth on today's link: all policies on an H200, beside stock and checkpoint, simulated.

    python -m bench.memory.link            # about a minute

The first table has time and peak of each policy without a budget, as multiples of stock's. The second one says why: how
many operations a device does in the time of one byte over its link, and which part of what forward saves can leave
while forward runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.memory.paper_rows import simulated
from bench.tools.results import cpu_conditions, save
from bench.tools.script import command_line, note, out_of, run_main
from ucudnn.memory.devices.profile import DeviceProfile, load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.step.graph import Phase, StepGraph
from ucudnn.memory.step.shipped import open_step

STEPS = {"resnet50": 256, "inception_v3": 64, "densenet121": 64, "vgg16": 128, "unet2d": 8, "unet3d": 4, "gpt2": 8}
POLICIES = (
    "stock", "checkpoint", "vdnn-conv-p", "vdnn-all-p", "vdnn-ext-conv-p", "vdnn-ext-all-p", "swap", "swap-capped",
    "dymem", "dymem-skip",
)  # fmt: skip
DEVICES = ("titan-x", "h200")


def compare(graph: StepGraph, profile: DeviceProfile) -> dict[str, dict[str, float]]:
    """Return time and peak of each policy as multiples of stock's."""
    done = {policy: simulated(graph, profile, policy) for policy in POLICIES}
    stock = done["stock"]
    assert stock is not None
    return {
        policy: {"time": each.time_ms / stock.time_ms, "peak": each.peak_bytes / stock.peak_bytes}
        for policy, each in done.items()
        if each is not None
    }


def balance(graph: StepGraph, profile: DeviceProfile) -> dict[str, float]:
    """Return operations in the time of a byte over the link, and the part of the saved bytes that forward can hide."""
    times = device_costs(profile, graph).time_ms
    flops = sum(operation.flops.at(graph.batch) for operation in graph.operations)
    forward = sum(time for time, each in zip(times, graph.operations, strict=True) if each.phase is Phase.FORWARD)
    saved = sum(graph.sizes[storage] for storage in graph.saved)
    return {
        "operations_for_a_byte": flops / (sum(times) / 1e3) / profile.to_host,
        "part_that_leaves": forward / 1e3 * profile.to_host / saved,
    }


def policy_rows(answer: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield time and peak of each policy but stock, over stock's, in each step."""
    for policy in POLICIES[1:]:
        found = [answer["policies"][step][policy] for step in answer["steps"]]
        yield [policy, *(f"{each['time']:.2f}, {each['peak']:.0%}" for each in found)]


def balance_rows(answer: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield operations in the time of a byte, and the part of the saved bytes that forward hides, for each step."""
    for step, batch in answer["steps"].items():
        found = [answer["balance"][step][device] for device in DEVICES]
        rates = [f"{each['operations_for_a_byte']:,.0f}" for each in found]
        yield [f"{step} {batch}", *rates, *(f"{each['part_that_leaves']:.0%}" for each in found)]


def run(steps: Sequence[str]) -> dict[str, Any]:
    """Return everything for some steps."""
    answer: dict[str, Any] = {"conditions": cpu_conditions("ucudnn"), "steps": {}, "policies": {}, "balance": {}}
    for step in steps:
        note(step)
        graph = open_step(step).with_batch(STEPS[step])
        answer["steps"][step] = STEPS[step]
        answer["policies"][step] = compare(graph, load_device("h200"))
        answer["balance"][step] = {device: balance(graph, load_device(device)) for device in DEVICES}
    return answer


def main() -> None:
    """Simulate everything, print the rows of both tables, and write them."""
    arguments = command_line(__doc__, "bench.memory.link", "memory/link.json").parse_args()
    answer = run([*STEPS])
    for row in (*policy_rows(answer), *balance_rows(answer)):
        print(" | ".join(row))
    save(out_of(arguments), answer)


if __name__ == "__main__":
    run_main(main)
