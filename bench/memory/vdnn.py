"""vDNN (Rhu et al., arXiv 1602.08124) on the paper's Titan X, simulated, beside the figures of the paper and its study.

    python -m bench.memory.vdnn

Nothing here runs on a device. A network's step has two readings: as PyTorch runs it, and as a program around cuDNN runs
it, which is what the papers measured (see `bench.memory.layer_step`).
"""

from bench.memory.paper_rows import (
    GIB,
    LAYERS,
    PaperRow,
    over_readings,
    print_and_save,
    simulated,
    steps_of,
    table_parser,
)
from bench.tools.script import run_main, verdict
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.simulation.result import Simulation
from ucudnn.memory.step.graph import StepGraph

TITAN = load_device("titan-x")
MEMORY = 12 * GIB
PUBLISHED = {"vgg16": 1 / (1 - 0.19), "alexnet": 1 / (1 - 0.21)}
"""Times of all (p) at a mini-batch of 128 as multiples of the time without offloads: 19 and 21 % less throughput."""


def done(graph: StepGraph, policy: str, *, smallest: bool = False) -> Simulation:
    """Return what a policy takes without a budget."""
    found = simulated(graph, TITAN, policy, smallest=smallest)
    assert found is not None
    return found


def times_stock(graph: StepGraph, policy: str) -> float:
    """Return the time of a policy as a multiple of the time without offloads and with the fastest algorithms."""
    return done(graph, policy).time_ms / done(graph, "stock").time_ms


def gibibytes(graph: StepGraph, policy: str, *, smallest: bool = False) -> float:
    """Return the peak of a policy."""
    return done(graph, policy, smallest=smallest).peak_bytes / GIB


def average_bytes(found: Simulation) -> float:
    """Return the bytes that exist on average over the time of a step."""
    until = [*found.memory[1:], (found.time_ms, 0)]
    return sum(size * (end[0] - begin) for (begin, size), end in zip(found.memory, until, strict=True)) / found.time_ms


def saved_percent(graph: StepGraph) -> float:
    """Return by how much the average of all (m) is below base with (p), in percent, parameters left out of both."""
    staying = sum(size for size, after in zip(graph.sizes, graph.exists_after, strict=True) if after)
    base = done(graph, "base").peak_bytes
    return 100 * (1 - (average_bytes(done(graph, "vdnn-all-m")) - staying) / (base - staying))


def dynamic_percent(graph: StepGraph) -> float | None:
    """Return by how much dynamic lowers the throughput within 12 GiB, in percent of that with unlimited memory."""
    found = simulated(graph, TITAN, "vdnn-dynamic", MEMORY)
    return None if found is None else 100 * (1 - done(graph, "stock").time_ms / found.time_ms)


def lost_percent(graph: StepGraph, policy: str) -> float:
    """Return by how much a policy lowers the throughput, in percent."""
    return 100 * (1 - 1 / times_stock(graph, policy))


def alexnet_why() -> str:
    """Return what AlexNet's time would be without its classifier, which offloads nothing."""
    graph = steps_of("alexnet", 128)[LAYERS]
    times = device_costs(TITAN, graph).time_ms
    rest = sum(
        time
        for time, operation in zip(times, graph.operations, strict=True)
        if operation.module.startswith(("fc", "dropout", "softmax", "update"))
    )
    stock, offloading = (done(graph, policy).time_ms - rest for policy in ("stock", "vdnn-all-p"))
    return (
        f"Of our {sum(times):.0f} ms, {rest:.0f} are the classifier and updates, which offload nothing; "
        f"feature extraction alone takes {offloading / stock:.2f} times as long."
    )


def rows() -> list[PaperRow]:
    """Return all figures."""
    times = {name: over_readings(name, 128, lambda graph: times_stock(graph, "vdnn-all-p")) for name in PUBLISHED}
    graphs = [graph for name in ("alexnet", "vgg16") for graph in steps_of(name, 128).values()]
    saved = {f"{graph.name} of {len(graph.operations)} operations": saved_percent(graph) for graph in graphs}
    modelled = "Times of convolutions come from a model of the device. Copies beside pooling do not hide."
    kept = "The upper end is PyTorch's, with gradients of ReLU, indices of pooling and momentum."
    bases = {
        ("VGG-16", 256): ("28 GB", kept, "{:.1f} GiB"),
        ("VGG-16", 128): ("15 GB", "As above.", "{:.1f} GiB"),
        ("AlexNet", 128): ("1.1 GB", "As above; parameters, gradients and momentum are half of it.", "{:.2f} GiB"),
    }
    found = [
        PaperRow("VGG-16 128, all (p): time over no offload", f"{PUBLISHED['vgg16']:.2f}", times["vgg16"], modelled),
        PaperRow(
            "AlexNet 128, all (p): time over no offload", f"{PUBLISHED['alexnet']:.2f}", times["alexnet"], alexnet_why()
        ),
    ]
    for (title, batch), (paper, why, form) in bases.items():
        sizes = over_readings(title.lower().replace("-", ""), batch, lambda graph: gibibytes(graph, "base"))
        found.append(PaperRow(f"{title} {batch}, base", paper, sizes, why, form))
    least = "The least is X, dX and dY of the second convolution, the next X and the parameters."
    early = (
        "**It fits only if outputs are freed early**: each map of the first convolutions takes 3.1 GiB, and a layer"
        " whose X, Y, dX and dY stay to its end takes four. Ours then finds room for conv (p)."
    )
    slow = "The profile's algorithms without workspace were calibrated on AlexNet with cuDNN R2, which is slower."
    ends = "The papers say neither which networks make the ends nor whether parameters count. Here they do not."
    moved = over_readings("vgg16", 128, lambda graph: gibibytes(graph, "vdnn-all-m"))
    dynamic = over_readings("vgg16", 256, dynamic_percent)
    lost = over_readings("vgg16", 128, lambda graph: lost_percent(graph, "vdnn-all-m"))
    return [
        *found,
        PaperRow("VGG-16 128, all", "6 GB", moved, least, "{:.1f} GiB"),
        PaperRow("VGG-16 256 within 12 GB: loss of dynamic", "18 %", dynamic, early, "{:.1f} %"),
        PaperRow("VGG-16 128, all (m): loss of throughput", "61 %", lost, slow, "{:.0f} %"),
        PaperRow("memory saved on average, AlexNet and VGG-16", "73 to 98 %", saved, ends, "{:.0f} %"),
    ]


def main() -> None:
    """Simulate everything, print a table and write it."""
    arguments = table_parser(__doc__, "vdnn").parse_args()
    found = rows()
    print_and_save(arguments, found, required=[*requirements(found)])


def requirements(found: list[PaperRow]) -> list[dict[str, object]]:
    """Return how far the times of all (p) are from the paper's, in points; at most 10 are allowed."""
    kept = []
    for (name, published), row in zip(PUBLISHED.items(), found, strict=False):
        for reading, value in row.ours.items():
            points = 100 * abs((value or 0) - published)
            kept.append(verdict(f"{name} {reading}: points from the paper's time", points, 10, " points"))
    return kept


if __name__ == "__main__":
    run_main(main)
