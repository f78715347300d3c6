"""What collectives take in a plan, and what a report says of them."""

from dataclasses import replace

import pytest

from tests.support.sharded_ranks import on_ranks
from tests.support.step_graphs import StepBuilder
from ucudnn.memory.plans.actions import Action, ActionKind
from ucudnn.memory.policies.stock import StockPolicy
from ucudnn.memory.reports.plan_summary import sharded_lines
from ucudnn.memory.simulation.early_collectives import with_early_collectives
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.graph import RANKS, Role
from ucudnn.memory.step.sharded import RankLink, gathered_bytes, sharded_step
from ucudnn.memory.torch.sharding.agreement import slowest
from ucudnn.units import format_ms


def gathered_step():
    """Return a builder of a step that gathers a weight of 40 bytes from four ranks, and averages its gradient."""
    builder = StepBuilder(default=10).storage("shard", 10, Role.PARAMETER).storage("whole", 40)
    builder.storage("x", 10, Role.INPUT).storage("loss", 10, Role.OUTPUT).storage("dwhole", 40)
    builder.storage("mean", 10, Role.GRADIENT)
    builder.run("gather", "shard", "whole", kind=f"{RANKS}.all_gather", time=0.0)
    builder.run("mm", "x whole", "y", time=1.0).run("relu", "y", "z").run("loss", "z", "loss")
    builder.backward("dloss", "z loss", "dz").backward("dmm", "x whole dz", "dwhole")
    builder.backward("scatter", "dwhole", "mean", kind=f"{RANKS}.reduce_scatter", time=0.0)
    return builder.modules()


def test_a_collective_takes_its_latency_and_the_bytes_of_the_other_ranks():
    builder = gathered_step()
    graph, costs = builder.graph(), builder.costs()
    link = RankLink(ranks=4, latency_ms=0.5, bytes_per_ms=10.0)
    assert [gathered_bytes(graph, index) for index in range(7)] == [40, 0, 0, 0, 0, 0, 40]
    found = link.costs(graph, costs)
    assert found.time_ms == (0.5 * 3 + 3 / 4 * 40 / 10, *costs.time_ms[1:6], 4.5)
    assert replace(found, time_ms=costs.time_ms) == costs
    assert RankLink(ranks=1).time_ms(10**9) == 0


def both_ways(mesh):
    """Return a step as `fit` divides it, and as it is predicted from the undivided one: sizes, peaks, collectives."""
    import torch

    from tests.support.sharded_ranks import made_optimizer, sharded_network
    from ucudnn.memory import fit

    found = []
    for name in ("gpt without dropout", "resnet18", "unet"):
        ways = []
        for divided in (False, True) if mesh.get_local_rank() == 0 else (True,):  # the test reads what rank 0 found
            torch.manual_seed(0)
            model, inputs, loss = sharded_network(name)
            optimizer = made_optimizer("adamw", model.parameters())
            options = {"loss": loss, "optimizer": optimizer, "policy": "stock"}
            step = fit(model, inputs, **options, **({"mesh": mesh} if divided else {}))
            graph, costs = step.plan.graph, step.costs
            if not divided:
                graph, costs = sharded_step(graph, costs, RankLink(ranks=2))
            plan = StockPolicy().plan(graph, costs, None)
            held = {
                role.value: sum(
                    size for size, each in zip(graph.sizes, graph.storages, strict=True) if each.role is role
                )
                for role in Role
            }
            ways.append([simulate(plan, costs).peak_bytes, len(graph.collectives), held])
        found.append(ways)
    return found


@pytest.mark.parametrize("together", ["0", "20000"])
def test_a_step_is_predicted_for_ranks_as_fit_divides_it(together, tmp_path):
    for predicted, fitted in on_ranks(both_ways, tmp_path / "store", BUCKET_BYTES=together)[0]:
        assert predicted[1] == fitted[1] > (20 if together == "0" else 10)
        assert predicted[0] == pytest.approx(fitted[0], rel=0.03)
        for role in (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE, Role.BUFFER, Role.OUTPUT):
            assert predicted[2][role.value] == pytest.approx(fitted[2][role.value], rel=0.03), role


def test_the_slowest_link_of_all_ranks_counts():
    links = [RankLink(ranks=2, latency_ms=1.0, bytes_per_ms=5.0), RankLink(ranks=2, latency_ms=2.0, bytes_per_ms=7.0)]
    assert slowest(links) == RankLink(ranks=2, latency_ms=2.0, bytes_per_ms=5.0)


@pytest.mark.parametrize("again", [False, True])
def test_a_report_says_what_is_gathered_when(again):
    builder = gathered_step()
    graph = builder.graph()
    plan = StockPolicy().plan(graph, builder.costs(), None)
    if again:
        whole = next(index for index, each in enumerate(graph.storages) if each.name == "whole")
        actions = [*plan.actions]
        actions.insert(actions.index(Action(ActionKind.RUN, 5)), Action(ActionKind.RECOMPUTE, 0))
        actions.insert(actions.index(Action(ActionKind.RUN, 1)) + 1, Action(ActionKind.FREE, whole))
        plan = replace(plan, actions=tuple(actions))
    link = RankLink(ranks=4, latency_ms=0.5, bytes_per_ms=10.0)
    first, gathers, moved, averaged, overlap, how = sharded_lines(plan, link, simulate(plan, builder.costs()))
    assert first == "sharded over 4 ranks"
    count = 2 if again else 1
    assert gathers.startswith(f"gathered {'again for backward' if again else 'once'}: 40 B of parameters, by 1 ")
    assert moved == f"all_gather: {count} in a step, {30 * count} B over each link, {format_ms(4.5 * count)} apart"
    assert averaged == "reduce_scatter: 1 in a step, 30 B over each link, 4.50 ms apart"
    assert how.startswith("link: assumed, 0.5 ms from rank to rank")
    costs = link.costs(graph, builder.costs())
    early = with_early_collectives(plan, costs)
    assert overlap.startswith("overlap: predicted 0% of")
    *_, overlap, _ = sharded_lines(early, link, simulate(early, costs))
    # Nothing is beside the first gather and the reduction, and 1 ms of backward beside the second gather.
    assert overlap == f"overlap: predicted {1 / 13.5 if again else 0:.0%} of the collectives' time beside compute"
