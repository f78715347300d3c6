"""vDNN and vDNNExt on VGG-16 and AlexNet, simulated on the papers' Titan X and on an H200, beside the paper's losses.

    python -m bench.memory.vdnn

The paper measured all with (p) on a Titan X at a mini-batch of 128: 19 % less throughput than without offloads for
VGG-16 and 21 % less for AlexNet, which are 1.23 and 1.27 times the time. Nothing here runs on a device.
"""

from bench.tools.results import cpu_conditions, save
from bench.tools.script import command_line, out_of, run_main
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.policies.catalog import find_policy
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.steps import open_step

BATCH = 128
DEVICES = ("titan-x", "h200")
POLICIES = ("stock", "checkpoint", "vdnn-all-p", "vdnn-ext-all-p")
PAPER = {"vgg16": 1.23, "alexnet": 1.27}
"""Times of vDNN all (p) as multiples of the time without offloads."""

WHY = {
    "vgg16": "The convolutions' times come from a model of the device, and copies beside short layers do not hide.",
    "alexnet": "The step is torchvision's AlexNet, whose first convolutions have fewer filters than the paper's.",
}


def rows(device: str, step: str) -> dict[str, dict[str, float]]:
    """Return time and peak of each policy, also as multiples of stock's."""
    graph = open_step(step).with_batch(BATCH)
    costs = device_costs(load_device(device), graph)
    done = {name: simulate(find_policy(name).plan(graph, costs, None), costs) for name in POLICIES}
    stock = done["stock"]
    return {
        name: {
            "time_ms": found.time_ms,
            "times_stock": found.time_ms / stock.time_ms,
            "peak_bytes": found.peak_bytes,
            "share_of_peak": found.peak_bytes / stock.peak_bytes,
            "offloaded_bytes": found.offloaded_bytes,
        }
        for name, found in done.items()
    }


def main() -> None:
    """Simulate everything, print a table and write it."""
    arguments = command_line(__doc__, __spec__.name, "memory/vdnn.json").parse_args()
    cases = {f"{step} on {device}": rows(device, step) for device in DEVICES for step in PAPER}
    print("| step | paper, vDNN all (p) | stock | vDNN | vDNNExt | checkpoint | peak: vDNN / checkpoint | why |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for device in DEVICES:
        for step, published in PAPER.items():
            found = cases[f"{step} on {device}"]
            times = {name: f"{found[name]['times_stock']:.2f}" for name in POLICIES}
            peaks = [f"{found[name]['share_of_peak']:.0%}" for name in ("vdnn-all-p", "checkpoint")]
            papers = (f"{published}", WHY[step]) if device == "titan-x" else ("", "An H200 computes in less time.")
            cells = [f"{step} {BATCH}, {device}", papers[0], f"{found['stock']['time_ms']:.1f} ms"]
            cells += [times["vdnn-all-p"], times["vdnn-ext-all-p"], times["checkpoint"], " / ".join(peaks), papers[1]]
            print(f"| {' | '.join(cells)} |")
    conditions = cpu_conditions("ucudnn")
    save(out_of(arguments), {"conditions": conditions, "batch": BATCH, "paper": PAPER, "cases": cases})


if __name__ == "__main__":
    run_main(main)
