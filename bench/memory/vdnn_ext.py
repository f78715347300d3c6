"""vDNN and vDNNExt (Shriram, Garg and Kulkarni) on the study's GTX 970, simulated, beside its tables 1 to 5.

    python -m bench.memory.vdnn_ext

The study does not say which AlexNet it trains. Readings: that of convnet-benchmarks (2014), and that of 2012 in one
column with and without local response normalization. Its times and sizes are those of 2012 without normalization. Steps
are those of layers of cuDNN (`bench.memory.layer_step`). The budget of dynamic is the 3.5 GiB of the GTX 970.

Who fetches the last X of feature extraction is open. As the study writes, the classifier "remains unchanged", so X
comes back beside the last pooling. In the other reading, layers of the classifier search for prefetches, too.
"""

from collections.abc import Callable, Mapping
from functools import cache

from bench.memory.layer_networks import NETWORKS
from bench.memory.layer_step import LayerRules
from bench.memory.paper_rows import MIB, PaperRow, print_and_save, simulated, table_parser
from bench.tools.script import run_main, verdict
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.policies.vdnn import Offloads, vdnn_plan
from ucudnn.memory.pools.best_fit import BestFitPool
from ucudnn.memory.simulation.result import Simulation
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.simulation.stalls import with_stalls
from ucudnn.memory.step.graph import StepGraph
from ucudnn.memory.step.layers import find_layers

GTX = load_device("gtx-970")
MEMORY = GTX.memory_bytes
ALEXNETS = {"of 2014": "alexnet", "of 2012": "alexnet_2012_plain", "of 2012 with normalization": "alexnet_2012"}
VGG = {"VGG-16": "vgg16"}
FETCHING = " with a classifier that fetches"
"""What the name of a network ends with in the other reading."""

WORKSPACES = "The workspaces of the profile's fastest algorithms are not those of the study's cuDNN."
Figure = Callable[[str, int], float | None]


@cache
def run(network: str, batch: int, policy: str, *, smallest: bool = False) -> Simulation | None:
    """Return what a policy takes; dynamic keeps the device's memory, others have no budget."""
    network, other, _ = network.partition(FETCHING)
    if other and policy.startswith("vdnn"):
        return run_other(network, batch, policy)
    budget = MEMORY if policy.endswith("dynamic") else None
    return simulated(graph_of(network, batch), GTX, policy, budget, smallest=smallest)


def run_other(network: str, batch: int, policy: str) -> Simulation | None:
    """Return what a static policy takes in the other reading; of dynamic there is none."""
    kind, letter = policy.rsplit("-", 1)
    if letter == "dynamic":
        return None
    graph = graph_of(network, batch)
    costs = device_costs(GTX, graph)
    layers = find_layers(graph, range(len(graph.operations)))
    offloads: Offloads = "all" if kind.endswith("all") else "conv"
    chosen = costs.fastest if letter == "p" else costs.smallest
    plans = [
        vdnn_plan(policy, graph, layers, offloads, chosen, synchronous=synchronous, classifier_fetches=True)
        for synchronous in (True, False)
    ]
    vdnn = simulate(plans[0], costs)
    return simulate(with_stalls(plans[1], costs, vdnn.peak_bytes), costs) if "ext" in kind else vdnn


def both_readings(networks: Mapping[str, str]) -> dict[str, str]:
    """Return networks by name in both readings of who fetches the last X."""
    return {**networks, **{name + FETCHING: network + FETCHING for name, network in networks.items()}}


@cache
def graph_of(network: str, batch: int) -> StepGraph:
    """Return a step."""
    return NETWORKS[network](LayerRules()).with_batch(batch)


def figure_of(value: Callable[..., float], *cases: tuple[str, bool]) -> Figure:
    """Return what gives a value of one or several policies, each with whether it takes the smallest workspaces."""

    def figure(network: str, batch: int) -> float | None:
        found = [run(network, batch, policy, smallest=smallest) for policy, smallest in cases]
        return None if None in found else value(*found)

    return figure


def milliseconds(policy: str) -> Figure:
    """Return what gives the time of a policy."""
    return figure_of(lambda found: found.time_ms, (policy, False))


def mebibytes(policy: str, *, smallest: bool = False) -> Figure:
    """Return what gives the peak of a policy."""
    return figure_of(lambda found: found.peak_bytes / MIB, (policy, smallest))


def placed(policy: str) -> Figure:
    """Return what gives the bytes of a policy in a best-fit pool (CNMeM), all that stays included."""

    def placed_mib(found: Simulation) -> float:
        pool = BestFitPool().place(found.lifetimes)
        return (found.peak_bytes - pool.live_bytes + pool.extent_bytes) / MIB

    return figure_of(placed_mib, (policy, False))


def more_than_base(policy: str) -> Figure:
    """Return what gives the milliseconds that a policy takes beyond base without workspace."""
    return figure_of(lambda found, base: found.time_ms - base.time_ms, (policy, False), ("base", True))


def speed(policy: str, *, smallest: bool) -> Figure:
    """Return what gives the speed of a policy in percent of that of base with the same algorithms."""
    return figure_of(lambda found, base: 100 * base.time_ms / found.time_ms, (policy, False), ("base", smallest))


def less_than_base(policy: str, *, smallest: bool) -> Figure:
    """Return what gives by how much the peak of a policy is below base with the same algorithms, in percent."""
    return figure_of(
        lambda found, base: 100 * (1 - found.peak_bytes / base.peak_bytes), (policy, False), ("base", smallest)
    )


def regained(suffix: str) -> Figure:
    """Return which part of the time that vDNN all loses vDNNExt wins back, in percent."""
    return figure_of(
        lambda base, slow, fast: 100 * (slow.time_ms - fast.time_ms) / (slow.time_ms - base.time_ms),
        ("base", suffix == "m"),
        *((f"{policy}-all-{suffix}", False) for policy in ("vdnn", "vdnn-ext")),
    )


def row(
    what: str, paper: str, networks: Mapping[str, str], batch: int, figure: Figure, why: str, form: str
) -> PaperRow:
    """Return a row over all readings of a network."""
    return PaperRow(what, paper, {name: figure(network, batch) for name, network in networks.items()}, why, form)


def memory_rows() -> list[PaperRow]:
    """Return tables 1 and 2, and figure 9."""
    unnamed = "That of 2012 without normalization takes 2869 MiB. The study does not name its AlexNet."
    another = "**Another choice.** The study takes conv (m), ours faster algorithms without offloads."
    cases = (
        (ALEXNETS, "base", "3443 MB", unnamed),
        (ALEXNETS, "dynamic", "2113 MB", another),
        (ALEXNETS, "conv-m", "2113 MB", "That of 2012 without normalization takes 2142 MiB."),
        (ALEXNETS, "all-m", "1947 MB", "That of 2012 without normalization takes 2112 MiB: its dropout keeps masks."),
        (VGG, "dynamic", "2617 MB", "Both take conv. Ours fills the 3.5 GiB with workspace, the study's stays below."),
        (VGG, "conv-m", "2612 MB", "The same: parameters and X, Y, dX, dY of the second convolution."),
        (VGG, "all-m", "2612 MB", "The same."),
    )
    found = []
    for networks, policy, paper, why in cases:
        base = policy == "base"
        name, batch = ("VGG-16", 42) if networks is VGG else ("AlexNet", 512)
        title = {"base": "base (m)", "conv-m": "conv (m)", "all-m": "all (m)"}.get(policy, policy)
        figure = mebibytes(policy if base else f"vdnn-{policy}", smallest=base)
        found.append(row(f"{name} {batch}, {title}", paper, networks, batch, figure, why, "{:.0f} MiB"))
    for suffix, paper in (("m", "53 to 60 %"), ("p", "34 to 50 %")):
        both = ALEXNETS | VGG
        sizes = {name: 16 if network == "vgg16" else 128 for name, network in both.items()}
        figure = less_than_base(f"vdnn-all-{suffix}", smallest=suffix == "m")
        values = {name: figure(network, sizes[name]) for name, network in both.items()}
        why = "Ours has less to save: base keeps outputs of activations in place of their inputs."
        found.append(PaperRow(f"AlexNet 128 and VGG-16 16: saved by all ({suffix})", paper, values, why, "{:.0f} %"))
    return found


def time_rows() -> list[PaperRow]:
    """Return table 3 and figure 10."""
    rows = []
    papers = {
        "AlexNet 512": (ALEXNETS, 512, {"dynamic": (1482, 1475), "conv-m": (1482, 1475), "all-m": (1553, 1497)}),
        "VGG-16 42": (VGG, 42, {"dynamic": (864, 864), "conv-m": (1722, 1722), "all-m": (1835, 1777)}),
    }
    whys = {
        ("AlexNet 512", "dynamic"): "**Another choice.** Ours takes faster algorithms, see above.",
        ("AlexNet 512", "conv-m"): "AlexNet of 2012 without normalization: 1496 and 1494 ms.",
        ("AlexNet 512", "all-m"): "AlexNet of 2012 without normalization: 1582 and 1501 ms.",
        ("VGG-16 42", "conv-m"): "The profile of the device is calibrated on this time.",
        ("VGG-16 42", "all-m"): "Copies beside pooling are not hidden; ours wait a little longer.",
        ("VGG-16 42", "dynamic"): "Predicted; nothing was calibrated on it.",
    }
    for name, (networks, batch, published) in papers.items():
        for policy, times in published.items():
            for kind, paper in zip(("vdnn", "vdnn-ext"), times, strict=True):
                title = "vDNN" if kind == "vdnn" else "vDNNExt"
                what, why = f"{name}, {title} {policy}", whys[name, policy]
                cases = networks if policy == "dynamic" else both_readings(networks)
                rows.append(row(what, f"{paper} ms", cases, batch, milliseconds(f"{kind}-{policy}"), why, "{:.0f} ms"))
    rows += waiting_rows()
    why = (
        "AlexNet of 2012 without normalization: (p) 89 and 98 %, (m) 94 and 99 %. All copies of vDNNExt hide where the"
        " classifier fetches; the study's threads and locks cost time."
    )
    for suffix, percents in (("p", (87, 95)), ("m", (94, 98))):
        for kind, percent in zip(("vdnn", "vdnn-ext"), percents, strict=True):
            title = "vDNN" if kind == "vdnn" else "vDNNExt"
            figure = speed(f"{kind}-all-{suffix}", smallest=suffix == "m")
            what = f"AlexNet 128, {title} all ({suffix}): speed of base"
            rows.append(row(what, f"{percent} %", both_readings(ALEXNETS), 128, figure, why, "{:.0f} %"))
    for suffix, part in (("p", "46 to 65 %"), ("m", "42 to 64 %")):
        values = {name: regained(suffix)(network, 128) for name, network in both_readings(ALEXNETS).items()}
        values |= {name: regained(suffix)(network, 16) for name, network in both_readings(VGG).items()}
        what = f"part of the loss of all ({suffix}) that vDNNExt wins back"
        rows.append(PaperRow(what, part, values, "No thread or lock costs time in the simulation.", "{:.0f} %"))
    return rows


def waiting_rows() -> list[PaperRow]:
    """Return what vDNN and vDNNExt take beyond base (m), which takes 1473 ms in the study (section 5.3)."""
    plain = {name: network for name, network in both_readings(ALEXNETS).items() if "normalization" not in name}
    published = {"conv-m": (9, 2), "all-m": (80, 24)}
    whys = {
        "conv-m": "AlexNet of 2012: the last convolution's X needs 10.4 ms to come back. The last pooling hides 1.5 of"
        " them (8.9 and 7.1 ms); where the classifier fetches, it hides none for vDNN, and all for vDNNExt.",
        "all-m": "AlexNet of 2012: 94.9 and 14.0 ms, of which vDNN waits 74 beside pooling of forward.",
    }
    rows = []
    for policy, times in published.items():
        for kind, paper in zip(("vdnn", "vdnn-ext"), times, strict=True):
            what = f"AlexNet 512, {'vDNN' if kind == 'vdnn' else 'vDNNExt'} {policy}: more than base (m)"
            figure = more_than_base(f"{kind}-{policy}")
            rows.append(row(what, f"{paper} ms", plain, 512, figure, whys[policy], "{:.1f} ms"))
    return rows


def fragmentation_rows() -> list[PaperRow]:
    """Return tables 4 and 5, whose last rows are labelled all (p) and conv (m) and mean all (m)."""
    policies = ("dynamic", "conv-p", "conv-m", "all-p", "all-m")
    alexnet = ((1188, 1625), (1188, 1666), (710, 943), (1113, 1591), (667, 809))
    vgg = ((1853, 2445), (1610, 2053), (1323, 1715), (1414, 1857), (1323, 1519))
    papers = {"AlexNet 128": (ALEXNETS, 128, alexnet), "VGG-16 16": (VGG, 16, vgg)}
    rows = []
    for name, (networks, batch, published) in papers.items():
        for policy, (expected, actual) in zip(policies, published, strict=True):
            what = f"{name}, {policy}: expected"
            why = WORKSPACES if "m" not in policy else "As tables 1 and 2."
            rows.append(row(what, f"{expected} MB", networks, batch, mebibytes(f"vdnn-{policy}"), why, "{:.0f} MiB"))
            what = f"{name}, {policy}: in the pool"
            why = "Parameters lie outside our pool, and CNMeM's lists may differ from plain best fit."
            rows.append(row(what, f"{actual} MB", networks, batch, placed(f"vdnn-{policy}"), why, "{:.0f} MiB"))
    return rows


def requirements() -> list[dict[str, object]]:
    """Return whether vDNNExt is faster than vDNN in all, as fast in conv and dynamic, and never above vDNN's peak.

    Where dynamic takes all, its row is one of all.
    """
    networks = both_readings({**{network: network for network in ALEXNETS.values()}, "vgg16": "vgg16"})
    cases = [(name, batch) for name in networks for batch in ((16, 42) if "vgg16" in name else (128, 512))]
    met = []
    for name, batch in cases:
        everything = run(name, batch, "vdnn-all-m")
        for policy in ("all-m", "all-p", "conv-m", "conv-p", "dynamic"):
            slow, fast = run(name, batch, f"vdnn-{policy}"), run(name, batch, f"vdnn-ext-{policy}")
            if slow is None or fast is None or everything is None:
                continue
            all_leave = slow.offloaded_bytes == everything.offloaded_bytes
            what = f"{name} {batch} {policy}{', which takes all' if policy == 'dynamic' and all_leave else ''}"
            met.append(verdict(f"{what}: peak of vDNNExt over vDNN's", fast.peak_bytes / slow.peak_bytes, 1))
            ratio = fast.time_ms / slow.time_ms
            if all_leave:
                met.append(verdict(f"{what}: time of vDNNExt over vDNN's", ratio, 0.999))
            else:
                met.append(verdict(f"{what}: vDNNExt apart from vDNN in percent", 100 * abs(1 - ratio), 1, " %"))
    return met


def main() -> None:
    """Simulate everything, print a table and write it."""
    arguments = table_parser(__doc__, "vdnn_ext").parse_args()
    found = [*memory_rows(), *time_rows(), *fragmentation_rows()]
    print_and_save(arguments, found, required=requirements())


if __name__ == "__main__":
    run_main(main)
