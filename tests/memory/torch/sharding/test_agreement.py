"""Ranks of a sharded step decide together: one plan, one refusal, and smaller mini-batches of some of them."""

import copy
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support.forked_ranks import run_forked_ranks
from tests.support.sharded_ranks import Odd, fsdp2, made_optimizer, on_ranks, trained
from tests.support.step_graphs import small_line
from ucudnn.errors import BudgetError, InvalidValueError, UcudnnError
from ucudnn.memory import fit
from ucudnn.memory.policies.stock import StockPolicy
from ucudnn.memory.torch.sharding import sharded_step
from ucudnn.memory.torch.sharding.agreement import Agreement
from ucudnn.memory.torch.sharding.collectives import started

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")


class Own(nn.Module):
    """Computes what each rank wants."""

    def __init__(self, compute):
        super().__init__()
        self.layer, self.compute = nn.Linear(6, 4), compute

    def forward(self, x):
        return self.compute(self.layer(x))


def refused(action, *arguments):
    """Return the class and the text of what an action raises."""
    try:
        action(*arguments)
    except UcudnnError as error:
        return [type(error).__name__, str(error)]
    return None


def fitted_otherwise(mesh, computes, **options):
    """Return how a fit ends in which each rank computes something else."""
    model, (x, y) = Own(computes[mesh.get_local_rank()]), (torch.randn(5, 6), torch.randn(5, 4))
    return refused(lambda: fit(model, (x, y), loss=functional.mse_loss, mesh=mesh, **options))


def fails(x):
    raise InvalidValueError("no such layer")


def decisions(mesh):
    """Return what a rank finds where ranks differ."""
    rank = mesh.get_local_rank()
    torch.manual_seed(0)
    model, loss = Odd(), functional.mse_loss
    data = [(torch.randn(5, 6), torch.randn(5, 1)) for _ in range(3 + rank)][rank:]
    last = [each[: 3 if rank == 1 else 5] for each in data[-1]]
    found = {}
    results = []
    for way in ("fsdp2", "fit"):
        own = copy.deepcopy(model) if way == "fit" else fsdp2(copy.deepcopy(model), mesh)
        optimizer = made_optimizer("sgd", own.parameters())
        if way == "fit":
            step = call = fit(own, data[0], loss=loss, optimizer=optimizer, mesh=mesh, policy="checkpoint", debug=True)
            smaller = [each[: 3 if rank == 1 else 5] for each in data[0]]
            found["first"] = refused(step, *smaller)
            step(*data[0])
            larger = [torch.cat([each, each]) for each in data[0]] if rank == 1 else data[0]
            found["larger"] = refused(step, *larger)
        else:

            def call(*args, own=own):
                return loss(own(*args[:-1]), args[-1])

        numbers = trained(own, call, optimizer, [*data, last])
        own.eval()
        with torch.no_grad():
            results.append((*numbers, own(data[0][0]) if way == "fsdp2" else step(data[0][0])))
    one, other = results
    found["same"] = [one[0] == other[0], all(map(torch.equal, one[2], other[2])), torch.equal(one[3], other[3])]
    found["step"] = fitted_otherwise(mesh, (torch.tanh, torch.sigmoid))
    found["code"] = fitted_otherwise(mesh, (lambda x: x * 2.0, lambda x: x * 3.0))
    found["budget"] = fitted_otherwise(mesh, (torch.tanh, torch.tanh), budget="1GiB" if rank == 0 else "100B")
    found["fails"] = fitted_otherwise(mesh, (torch.tanh, fails))
    checkpointed = Own(lambda x: x)
    checkpointed.forward = lambda x: checkpoint(lambda x: checkpointed.layer(x).tanh(), x, use_reentrant=False)
    inputs = torch.randn(5, 6), torch.randn(5, 4)
    found["checkpoint"] = refused(lambda: fit(checkpointed, inputs, loss=loss, mesh=mesh))
    return found


def test_what_one_rank_finds_is_decided_by_all(tmp_path):
    first, second = on_ranks(decisions, tmp_path / "store")
    assert first["same"] == second["same"] == [True, True, True]
    assert first["first"] == second["first"]
    assert first["first"][1].startswith("in its first step a sharded step takes arguments like the sample on all")
    assert second["larger"][0] == "InvalidValueError"
    assert second["larger"][1].startswith("argument 0 is 10x6")
    assert first["larger"] == ["InvalidValueError", f"rank 1: {second['larger'][1]}"]
    for what in ("step", "code"):
        assert first[what] == second[what]
        assert first[what][1].startswith(f"rank 1: another {what} than rank 0"), what
    assert first["budget"][0] == second["budget"][0] == "BudgetError"
    assert first["fails"] == ["InvalidValueError", "rank 1: no such layer"]
    assert second["fails"] == ["InvalidValueError", "no such layer"]
    assert "the step calls torch.utils.checkpoint: parameters are gathered" in first["checkpoint"][1]


def ends(mesh, how):
    """Train until a rank is gone, and return what the other one is told and after how long."""
    sharded_step.SILENCE = timedelta(seconds=6)  # it bounds how long ranks connect, too
    torch.manual_seed(0)
    data = torch.randn(5, 6), torch.randn(5, 1)
    step = fit(Odd(), data, loss=functional.mse_loss, mesh=mesh, policy="checkpoint")
    step(*data).backward()
    if mesh.get_local_rank() == 1:
        if how == "killed":
            os._exit(1)
        if how == "silent":
            time.sleep(15)
            os._exit(1)
        with suppress(ArithmeticError):
            step._step.forward = raises
            step(*data)
        time.sleep(6)
        os._exit(1)
    begin = time.monotonic()
    told = refused(lambda: step(*data).backward())
    sys.stdout.write(f"{told[1]}\n{time.monotonic() - begin}\n")
    sys.stdout.flush()
    os._exit(0)


def raises(*_):
    raise ArithmeticError("nothing to divide")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "silent", "raises"])
def test_a_rank_that_is_gone_is_named_to_the_others(tmp_path, how):
    program = "from tests.support.sharded_ranks import serve; serve()"
    given = ends.__module__, ends.__name__, tmp_path / "store", 2, f'["{how}"]'
    (output, errors, status), _ = run_forked_ranks(program, *given, timeout=200)
    assert status == 0, errors
    told, seconds = output.splitlines()
    assert float(seconds) < 40  # of which 6 are the timeout of this test
    if how == "raises":
        assert told.startswith("rank 1 has failed: ArithmeticError: nothing to divide")
    else:
        assert told == "rank 1 has ended, or does not come, and a sharded step needs all ranks"


def test_a_collective_has_ended_when_its_threads_hold_no_tensor_of_the_step():
    held, shard, full = [], torch.zeros(2), torch.zeros(4)

    class Work:
        def wait(self):
            threading.Timer(0.2, held.clear).start()

    def collective(*tensors, group):
        held.extend(tensors)
        return Work()

    wait = started(None, collective, full, shard)
    gone = [StorageWeakRef(each.untyped_storage()) for each in (full, shard)]
    assert len(held) == 2
    wait()
    del full, shard, wait
    assert [each.expired() for each in gone] == [True, True]


def test_the_largest_times_and_the_least_rooms_count():
    line = small_line()
    graph, costs = line.graph(), line.costs()
    other = replace(costs, time_ms=(costs.time_ms[0] + 1, *costs.time_ms[1:]), offload_bytes_per_ms=1.0)
    found = Agreement(lambda value: [value, value] if isinstance(value, str) else [value, other]).costs(graph, costs)
    assert found.time_ms == other.time_ms
    assert found.offload_bytes_per_ms == 1.0
    assert found.prefetch_bytes_per_ms == costs.prefetch_bytes_per_ms
    with pytest.raises(InvalidValueError, match="rank 1: another step than rank 0"):
        Agreement(lambda value: [value, f"{value}."]).costs(graph, costs)


def test_a_rank_that_does_not_plan_has_the_plan_of_the_first():
    line = small_line()
    graph, costs = line.graph(), line.costs()
    plan = StockPolicy().plan(graph, costs, None)
    sent = []

    def exchange(value):
        sent.append(value)
        return [value, None]

    assert Agreement(exchange).plan(lambda: plan, graph) is plan
    answers = iter([[None, None], [sent[-1], None]])
    assert Agreement(lambda _: next(answers), rank=1).plan(fails, graph) == plan
    refusal = BudgetError("too little", kernel="", limit_bytes=1, required_bytes=2)
    with pytest.raises(BudgetError, match="rank 0: too little"):
        Agreement(lambda _: [refusal, None], rank=1).plan(fails, graph)
