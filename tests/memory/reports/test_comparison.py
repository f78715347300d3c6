"""Tests of the table of policies: its figures are the simulator's, and what does not fit says why."""

import csv
import io
import json
from dataclasses import replace

import pytest

from tests.support.step_graphs import StepBuilder
from ucudnn.errors import BudgetError, InvalidValueError
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.devices.roofline import device_costs
from ucudnn.memory.planner.planner import make_plan
from ucudnn.memory.policies.catalog import find_policy
from ucudnn.memory.pools.planned import PlannedPool
from ucudnn.memory.reports.comparison import POOLS, compare_policies, policy_fronts
from ucudnn.memory.simulation.simulator import simulate
from ucudnn.memory.step.shipped import open_step
from ucudnn.units import format_bytes, format_ms, parse_bytes

GIB = 2**30


@pytest.fixture(scope="module")
def step():
    graph = open_step("resnet50").with_batch(64)
    return graph, device_costs(load_device("h200"), graph)


def fronts_of(step, policies, points):
    """Return the plans of each policy."""
    found = {name: [] for name in policies}
    for each in policy_fronts(*step, policies, points).plans:
        found[each.policy].append(each)
    return found


def test_figures_are_those_of_the_simulator(step):
    found = compare_policies(*step, 4 * GIB, ["stock", "checkpoint"])
    simulated = simulate(find_policy("checkpoint").plan(*step, 4 * GIB), step[1])
    stock, checkpoint = found.rows
    assert checkpoint.done == simulated
    assert checkpoint.numbers()["peak_bytes"] <= 4 * GIB
    assert checkpoint.numbers()["recompute_ms"] > 0
    assert stock.done is None
    assert stock.least_bytes > 4 * GIB
    assert "policy stock needs" in stock.reason
    assert checkpoint.placements.keys() == {*POOLS}
    assert checkpoint.placements["planned"].waste <= checkpoint.placements["best fit"].waste


@pytest.mark.parametrize("budget", [4 * GIB, None])
def test_auto_is_what_fit_plans_and_names_its_policy(step, budget):
    plan = make_plan(*step, budget, "auto")
    auto, checkpoint = compare_policies(*step, budget, ["auto", "checkpoint"]).rows
    assert auto.policy == f"auto: {plan.policy}"
    assert auto.plan.actions == plan.actions
    assert auto.done == simulate(plan, step[1])
    assert auto.done.time_ms <= checkpoint.done.time_ms
    assert auto.placements.keys() == {*POOLS}


def test_auto_has_a_front_on_which_it_is_the_fastest(step):
    fronts = fronts_of(step, ["auto", "checkpoint"], 2)
    best = {each.budget_bytes: each.time_ms for each in fronts["auto"]}
    assert len(best) > 1
    assert all(each.time_ms >= best.get(each.budget_bytes, 0) for each in fronts["checkpoint"])


def test_a_front_has_no_plan_that_another_one_of_its_policy_beats(step):
    fronts = fronts_of(step, ["dymem", "checkpoint"], 4)
    for found in fronts.values():
        assert [each.peak_bytes for each in found] == sorted(each.peak_bytes for each in found)
        assert [each.time_ms for each in found] == sorted({each.time_ms for each in found}, reverse=True)
    assert len(fronts["dymem"]) < len(fronts["checkpoint"])


def test_pieces_that_several_plans_have_are_placed_with_a_search_once(step, monkeypatch):
    placed = []
    real = PlannedPool.place

    def place(pool, lifetimes):
        placed.append(lifetimes)
        return real(pool, lifetimes)

    monkeypatch.setattr(PlannedPool, "place", place)
    rows = compare_policies(*step, None, ["stock", "vdnn-all-p", "vdnn-dynamic", "stock"]).rows
    assert len(placed) == len({*placed}) == len({row.done.lifetimes for row in rows}) < len(rows)
    for row in rows:
        assert row.placements["planned"].waste == real(PlannedPool(), row.done.lifetimes).waste


def test_a_table_has_a_row_for_each_plan_and_a_line_for_the_others(step):
    found = compare_policies(*step, 4 * GIB, ["stock", "checkpoint"])
    assert found.title() == "resnet50, mini-batch 64, predicted for h200, not measured, within 4 GiB"
    assert [row[0] for row in found.cells()] == ["checkpoint", "stock"]
    assert found.cells()[1][1] == f"needs {format_bytes(found.rows[0].least_bytes)}"
    assert all(len(row) == len(found.headings()) for row in found.cells())


def test_the_fastest_plan_is_first_and_slow_ones_share_a_row(step):
    found = compare_policies(*step, 4 * GIB, ["spill", "vdnn-all-p", "joint", "checkpoint"])
    cells = found.cells()
    assert [row[0] for row in cells] == ["joint", "checkpoint", "2 others"]
    assert cells[2][1] == f"from {format_ms(min(found.rows[0].done.time_ms, found.rows[1].done.time_ms))}"
    assert "more than 2 times as slow: spill, vdnn-all-p" in found.lines()
    times = {row.policy: row.done.time_ms for row in found.rows}
    assert min(times["spill"], times["vdnn-all-p"]) > 2 * times["joint"] > times["checkpoint"] > times["joint"]
    assert [row["policy"] for row in found.to_dict()["policies"]] == [*times]


def test_the_answer_is_a_line_of_python_that_keeps_the_budget(step):
    line = compare_policies(*step, 4 * GIB, ["stock", "checkpoint"]).lines()[-1]
    assert line.startswith("best: checkpoint, ")
    given = {}
    call = line[line.index("fit(") :]
    eval(
        call,
        {name: None for name in ("model", "x", "y", "loss", "optimizer")} | {"fit": lambda *_, **k: given.update(k)},
    )
    assert (parse_bytes(given["budget"]), given["policy"]) == (4 * GIB, "checkpoint")
    odd = compare_policies(*step, 4 * GIB + 1, ["auto"])
    assert odd.lines()[-1].endswith(f"budget={4 * GIB + 1})")
    assert compare_policies(*step, 8 * GIB, ["stock"]).lines()[-1].endswith("GiB: the step fits as it is")


def test_a_sum_in_another_order_is_no_negative_percentage():
    graph = open_step("vgg16").with_batch(64)
    costs = device_costs(load_device("titan-x"), graph)
    found = compare_policies(graph, costs, None, ["vdnn-ext-conv-p"])
    assert found.rows[0].done.time_ms < sum(costs.time_ms)
    assert next(cell for cell in found.cells()[0] if "%" in cell) == "0.0%"


def test_a_step_that_takes_no_time_has_a_table():
    builder = StepBuilder().run("f", "", "a", time=0.0).backward("g", "a", "d", time=0.0)
    for each in (builder, StepBuilder()):
        cells = compare_policies(each.graph(), each.costs(), None, ["stock", "checkpoint"]).cells()
        assert [row[:3] for row in cells] == [["stock", "0 ms", "-"], ["checkpoint", "0 ms", "-"]]


def test_plans_that_wait_for_the_host_are_named(step):
    graph, costs = step
    time_ms = simulate(find_policy("stock").plan(graph, costs, None), costs).time_ms
    short, long = (
        replace(costs, issue_ms=(share * time_ms / len(graph.operations),) * len(graph.operations))
        for share in (0.99, 1.01)
    )
    assert len(compare_policies(graph, short, None, ["stock"]).lines()) == 2
    (_, line, _) = compare_policies(graph, long, None, ["stock"]).lines()
    assert line.startswith("stock waits for the host, which issues its operations in ")


def test_csv_and_json_have_the_figures(step):
    found = compare_policies(*step, None, ["stock", "base", "checkpoint"])
    rows = {row["policy"]: row for row in csv.DictReader(io.StringIO(found.to_csv()))}
    assert rows.keys() == {"stock", "base", "checkpoint"}
    assert (
        float(rows["base"]["peak_bytes"]) > float(rows["stock"]["peak_bytes"]) > float(rows["checkpoint"]["peak_bytes"])
    )
    answer = json.loads(json.dumps(found.to_dict()))
    assert answer["policies"][2]["time_ms"] == pytest.approx(float(rows["checkpoint"]["time_ms"]))
    assert {*answer["policies"][0]["fragmentation"]} == {*POOLS}


def test_a_budget_that_no_policy_keeps_is_an_error(step):
    with pytest.raises(BudgetError, match="policy checkpoint needs"):
        compare_policies(*step, 1 * GIB, ["stock", "checkpoint"])
    with pytest.raises(BudgetError, match="below the floor of resnet50"):
        compare_policies(*step, 2**20, ["stock", "checkpoint"])
    with pytest.raises(InvalidValueError, match="policy 'magic' is not known"):
        compare_policies(*step, None, ["magic"])


def test_fronts_trade_time_for_memory(step):
    fronts = fronts_of(step, ["stock", "checkpoint"], 5)
    assert len(fronts["stock"]) == 1
    points = sorted(fronts["checkpoint"], key=lambda each: each.peak_bytes)
    assert len(points) >= 3
    assert points[0].time_ms > points[-1].time_ms
    assert all(each.peak_bytes <= each.budget_bytes for each in points)
