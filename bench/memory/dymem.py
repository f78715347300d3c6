"""Dymem (Yang and Cheng) on the paper's Titan X of 12 GB, simulated, beside its figures 12 to 15 and table 2.

    python -m bench.memory.dymem           # about a minute

Steps are layers of cuDNN. The paper's vDNN runs depth first, in a pool of best fit, with Dymem's rule for workspaces.
The sizes of its pools show that it offloads all inputs, whatever the 12 GB would allow, so ours does, too. Dymem's pool
has two readings: that of a first iteration in a large pool without the squeeze gap, as published, and the smallest one
in which it runs, where forward waits for offloads.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from random import Random

from bench.memory.layer_networks import NETWORKS
from bench.memory.layer_step import LayerRules
from bench.memory.paper_rows import GIB, MIB, PaperRow, print_and_save, table_parser
from bench.tools.script import note, run_main
from ucudnn.configuration import Configuration
from ucudnn.errors import BudgetError
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.policies.dymem import DymemPolicy
from ucudnn.memory.policies.pool_room import fastest_in_room, room_for_workspaces
from ucudnn.memory.policies.vdnn import VdnnPolicy
from ucudnn.memory.pools.best_fit import BestFitPool
from ucudnn.memory.pools.two_ended import Mobility, TwoEndedPool, mobility_in
from ucudnn.memory.simulation.simulator import fixed_bytes, simulate
from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.graph import StepGraph

TITAN = load_device("titan-x")
MEMORY = 12 * GIB
DYMEM = {"stop": DymemPolicy(past_limit="stop"), "skip": DymemPolicy(past_limit="skip")}
VDNN = VdnnPolicy(offloads="all", fastest=False, depth_first=True)
DEPTHS = (50, 101, 152)
ITERATIONS = 100
VARIATIONS = (2, 5, 10)
"""By how many percent the bandwidth of the link may be more or less in an iteration."""


@cache
def subject(name: str, batch: int, *, smallest: bool = False, held: bool = True) -> tuple[StepGraph, Costs]:
    """Return a step and its costs; with the smallest workspaces there is nothing to choose."""
    graph = NETWORKS[name](LayerRules(outputs_held=held)).with_batch(batch)
    costs = device_costs(TITAN, graph, "smallest" if smallest else "fastest")
    return graph, replace(costs, configurations={}) if smallest else costs


@cache
def dymem_plans(name: str, batch: int, *, smallest: bool = False) -> Mapping[str, MemoryPlan]:
    """Return Dymem's plans by reading of the search and of the pool."""
    graph, costs = subject(name, batch, smallest=smallest)
    found = {}
    for reading, policy in DYMEM.items():
        found[f"{reading}, large pool"] = policy.plan(graph, costs, None)
        try:
            policy.plan(graph, costs, 0)
        except BudgetError:
            least = least_budget(policy, graph, costs)
            found[f"{reading}, smallest pool"] = policy.plan(graph, costs, least)
    return found


def least_budget(policy: DymemPolicy, graph: StepGraph, costs: Costs) -> int:
    """Return the smallest budget that Dymem keeps."""
    budget = 0
    while True:
        try:
            policy.plan(graph, costs, budget)
        except BudgetError as error:
            budget = error.required_bytes
        else:
            return budget


def bare(plan: MemoryPlan) -> MemoryPlan:
    """Return a plan without workspaces: what a pool must hold."""
    return replace(plan, configurations=device_costs(TITAN, plan.graph, "smallest").smallest)


def dymem_pool(plan: MemoryPlan) -> int:
    """Return the extent of Dymem's pool, which is the initial one without the squeeze gap."""
    costs = device_costs(TITAN, plan.graph, "smallest")
    return TwoEndedPool(mobility_in(plan)).place(simulate(bare(plan), costs).lifetimes).extent_bytes


def vdnn_pool(name: str, batch: int, *, grouped: bool = False) -> float:
    """Return the extent of vDNN's pool in MiB: best fit, or grouped by mobility."""
    graph, costs = subject(name, batch, smallest=True)
    plan = VDNN.plan(graph, costs, None)
    pool = TwoEndedPool(mobility_in(plan)) if grouped else BestFitPool()
    return pool.place(simulate(plan, costs).lifetimes).extent_bytes / MIB


def with_parameters(name: str, batch: int, pool_mib: float) -> float:
    """Return the size of a pool with all that exists before a step."""
    graph, costs = subject(name, batch, smallest=True)
    return pool_mib + fixed_bytes(VDNN.plan(graph, costs, None), costs) / MIB


def pool_rows() -> list[PaperRow]:
    """Return figures 12(a) and 15: sizes of pools."""
    cases = [("inception_v4", 128, "Inception-v4 128", "3650 MB", "2527 MB")]
    cases += [(f"resnet32_{side}", 100, f"ResNet-32 100, images of {side}", "2500 MB", "1854 MB")
              for side in (32, 224, 299)]  # fmt: skip
    rows = []
    for name, batch, title, vdnn, dymem in cases:
        plain, grouped = vdnn_pool(name, batch), vdnn_pool(name, batch, grouped=True)
        own = {reading: dymem_pool(plan) / MIB for reading, plan in dymem_plans(name, batch).items()}
        sizes = {"pool": plain, "with parameters": with_parameters(name, batch, plain)}
        images = "These are the paper's images: its vDNN agrees." if "224" in name else "The paper's images are of 224."
        why = images if "resnet32" in name else "The pool of best fit with all maps of 299 x 299."
        rows.append(PaperRow(f"{title}, vDNN's pool", vdnn, sizes, why, "{:.0f} MiB"))
        why = "**Reversed.** Copies far ahead of compute hold more than grouping saves."
        rows.append(PaperRow(f"{title}, Dymem's pool", dymem, own, why, "{:.0f} MiB"))
        why = "What grouping alone saves: vDNN's own copies in Dymem's pool."
        share = {"grouped": 100 * (grouped / plain - 1)}
        paper = "-31 %" if "inception" in name else "-26 %"
        rows.append(PaperRow(f"{title}, grouping over best fit", paper, share, why, "{:+.0f} %"))
    own = {reading: dymem_pool(plan) / MIB - vdnn_pool("alexnet", 256)
           for reading, plan in dymem_plans("alexnet", 256).items()}  # fmt: skip
    why = "The same sign: Dymem fetches more ahead."
    return [*rows, PaperRow("AlexNet 256, Dymem's pool over vDNN's", "+250 MB", own, why, "{:+.0f} MiB"), *depth_rows()]


def depth_rows() -> list[PaperRow]:
    """Return figure 12(a) for ResNet-50 to ResNet-152, of which the paper prints no numbers."""
    vdnn = {depth: vdnn_pool(f"resnet{depth}", 100) for depth in DEPTHS}
    dymem: dict[int, dict[str, float | None]] = {}
    for depth in DEPTHS:
        note(f"pools of ResNet-{depth}")
        dymem[depth] = {reading: dymem_pool(plan) / MIB for reading, plan in dymem_plans(f"resnet{depth}", 100).items()}
    rows = []
    least, most = DEPTHS[0], DEPTHS[-1]
    why = "vDNN holds a few layers at any depth."
    growth: dict[str, float | None] = {"pool": vdnn[most] / vdnn[least]}
    what = f"ResNet-{most} over ResNet-{least}, vDNN's pool"
    rows.append(PaperRow(what, "less than linear (3.0)", growth, why))
    growth = {reading: (size or 0.0) / (dymem[least][reading] or 1.0) for reading, size in dymem[most].items()}
    why = "What runs ahead grows with depth, unless the pool is the smallest one."
    what = f"ResNet-{most} over ResNet-{least}, Dymem's pool"
    return [*rows, PaperRow(what, "less than linear (3.0)", growth, why)]


def share_of_fastest(costs: Costs, chosen: Mapping[int, Configuration]) -> float:
    """Return the speed of all convolutions in percent of that with the fastest algorithms."""
    fastest = sum(front[-1].time_ms for front in costs.configurations.values())
    return 100 * fastest / sum(chosen[operation].time_ms for operation in costs.configurations)


def convolution_rows() -> list[PaperRow]:
    """Return figure 12(b): the speed of convolutions, also with the M40's algorithms: the same chip with cuDNN 5.1."""
    vdnn: dict[str, float | None] = {}
    dymem: dict[str, float | None] = {}
    smallest: dict[str, float | None] = {}
    cases = {"vgg16": ("VGG-16", 256), "inception_v4": ("Inception-v4", 128)}
    cases |= {f"resnet{depth}": (f"ResNet-{depth}", 100) for depth in DEPTHS}
    for name, (network, batch) in cases.items():
        graph, _ = subject(name, batch, held=name != "vgg16")
        for profile in (TITAN, load_device("m40")):
            costs = device_costs(profile, graph)
            case = f"{network} {batch}, {profile.title}"
            room = room_for_workspaces(VDNN.plan(graph, costs, None), costs, MEMORY, lambda _: Mobility.MOVABLE)
            vdnn[case] = share_of_fastest(costs, fastest_in_room(costs, room))
            smallest[case] = share_of_fastest(costs, costs.smallest)
            for reading, policy in DYMEM.items():
                try:
                    chosen = policy.plan(graph, costs, MEMORY).configurations
                except BudgetError:
                    note(f"{case}, {reading}: the step takes more than 12 GB")
                else:
                    dymem[f"{case}, {reading}"] = share_of_fastest(costs, chosen)
    why = "The fastest algorithms of the profiles need at most what the pool has left; cuDNN 7's may need more."
    what = "speed of five networks' convolutions"
    rows = [PaperRow(f"{what}, vDNN", "84 to 97 %", vdnn, why, "{:.0f} %")]
    rows.append(PaperRow(f"{what}, Dymem", "72 to 95 %", dymem, why, "{:.0f} %"))
    why = "Algorithms without workspace were calibrated on AlexNet with cuDNN R2."
    return [*rows, PaperRow("convolutions without workspace", "40 % on average", smallest, why, "{:.0f} %")]


def throughput_rows() -> list[PaperRow]:
    """Return figure 13: Dymem's throughput over vDNN's."""
    leads, alike = "higher", "not much higher"
    cases = [("resnet50", 100, "ResNet-50", "up to +42 %"), ("resnet101", 100, "ResNet-101", leads)]
    cases += [("resnet152", 100, "ResNet-152", leads), ("inception_v4", 128, "Inception-v4", leads)]
    cases += [("vgg16", 64, "VGG-16", alike), ("vgg16", 128, "VGG-16", alike), ("alexnet", 256, "AlexNet", alike)]
    fast = VdnnPolicy(offloads="all", fastest=True, depth_first=True)
    rows = []
    for name, batch, title, paper in cases:
        note(f"throughput of {title} {batch}")
        graph, costs = subject(name, batch)
        dymem = simulate(DYMEM["stop"].plan(graph, costs, None), costs).time_ms
        _, small_costs = subject(name, batch, smallest=True)
        small = [simulate(each.plan(graph, small_costs, None), small_costs).time_ms for each in (VDNN, DYMEM["stop"])]
        dynamic = simulate(VdnnPolicy(offloads="dynamic", depth_first=True).plan(graph, costs, MEMORY), costs)
        gains: dict[str, float | None] = {
            "over vDNN all (p)": 100 * (simulate(fast.plan(graph, costs, None), costs).time_ms / dymem - 1),
            "over vDNN all (m), both without workspace": 100 * (small[0] / small[1] - 1),
            "over vDNN dynamic": 100 * (dynamic.time_ms / dymem - 1),
        }
        offloads = "offloads less" if dynamic.offloaded_bytes else "offloads nothing"
        why = f"The least is over vDNN's dynamic choice, which {offloads} within 12 GB."
        if gains["over vDNN dynamic"] != min(value or 0.0 for value in gains.values()):
            why = "Over vDNN that offloads all inputs, and over its dynamic choice alike."
        elif paper == alike:
            why = "Over vDNN's dynamic choice, which offloads nothing within 12 GB, there is no gain, as in the paper."
        elif min(value or 0.0 for value in gains.values()) < 0:
            why = f"**Reversed against dynamic.** {why}"
        rows.append(PaperRow(f"{title} {batch}, Dymem's throughput", paper, gains, why, "{:+.0f} %"))
    return rows


def time_rows() -> list[PaperRow]:
    """Return figure 14: what copies hide."""
    rows = []
    for name, batch, title, paper in (("inception_v4", 128, "Inception-v4 128", "18 %"),
                                      ("resnet32_224", 100, "ResNet-32 100", "12 %")):  # fmt: skip
        graph, costs = subject(name, batch, smallest=True)
        for kind, policy, text in (("vDNN", VDNN, paper), ("Dymem", DYMEM["stop"], "up to 46 %")):
            done = simulate(policy.plan(graph, costs, None), costs)
            serial = done.compute_ms + done.offloaded_bytes / costs.offload_bytes_per_ms
            serial += done.prefetched_bytes / costs.prefetch_bytes_per_ms
            why = "In percent of compute and copies one after the other; the paper does not define its share."
            hidden: dict[str, float | None] = {"(m)": 100 * (1 - done.time_ms / serial)}
            rows.append(PaperRow(f"{title}, time that {kind} hides", text, hidden, why, "{:.0f} %"))
    return rows


def failure_rows() -> list[PaperRow]:
    """Return table 2: iterations that restart with a larger pool, by the reserve β."""
    graph, costs = subject("resnet101", 100)
    needed: dict[int, list[int]] = {}
    plan = DYMEM["stop"].plan(graph, costs, None)
    pool = TwoEndedPool(mobility_in(plan))
    first = pool.place(simulate(bare(plan), costs).lifetimes).extent_bytes
    for percent in VARIATIONS:
        note(f"{ITERATIONS} iterations whose link varies by {percent} %")
        random = Random(percent)
        for _ in range(ITERATIONS):
            rate = 1 + random.uniform(-percent, percent) / 100
            varied = replace(
                costs,
                offload_bytes_per_ms=costs.offload_bytes_per_ms * rate,
                prefetch_bytes_per_ms=costs.prefetch_bytes_per_ms * rate,
            )
            extent = pool.place(simulate(bare(plan), varied).lifetimes).extent_bytes
            needed.setdefault(percent, []).append(extent)
    rows = []
    for reserve, paper in ((100, "5 %"), (300, "0.9 %"), (500, "0 %")):
        failed = {
            f"link varies by {percent} %": 100 * sum(each > first + reserve * MIB for each in extents) / ITERATIONS
            for percent, extents in needed.items()
        }
        why = "The paper does not say what varies; here it is the link, from iteration to iteration."
        rows.append(PaperRow(f"ResNet-101 100, failures with β of {reserve} MB", paper, failed, why, "{:.0f} %"))
    return rows


def main() -> None:
    """Simulate everything, print a table and write it."""
    arguments = table_parser(__doc__, "dymem").parse_args()
    print_and_save(arguments, [*pool_rows(), *convolution_rows(), *throughput_rows(), *time_rows(), *failure_rows()])


if __name__ == "__main__":
    run_main(main)
