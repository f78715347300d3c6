"""Ranks under DDP and FSDP tune in the same steps, exchange nothing for that, and train as without ucudnn."""

import json

import pytest
import torch

from tests.support.forked_ranks import run_forked_ranks

RANK = """
import ctypes
import json
import os
import sys

import pytest
import torch
import torch.distributed as distributed
import torch.distributed.nn  # before there is a process group: see tests/support/ranks.py

from tests.support.host_gpu import Host
from tests.support.tuned_program import TunedProgram

rank, store, library, wrapper = int(sys.argv[1]), *sys.argv[2:5]
MOST_STEPS = 160  # all is settled after 84 in most runs
WAYS = {"auto": None, "stated": 3000, "baseline": None}  # limits in bytes; baseline takes as many steps as the others


def wrapped(model):
    if wrapper == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for each in model:
        if list(each.parameters()):
            fully_shard(each, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def refused(*arguments, **options):
    raise AssertionError("a collective of ours")


def settled(on, all_reduce=distributed.all_reduce):
    left = torch.tensor([float(each.phase != "settled") for each in on.report().tuned]).sum()
    all_reduce(left)
    return not left  # on all ranks


stub = ctypes.CDLL(library)
stub.stub_clock.restype = ctypes.c_int64
host = Host(stub)
host.install(pytest.MonkeyPatch())
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
try:
    answers = {}
    for way, limit in WAYS.items():
        enabled = way != "baseline"
        one = TunedProgram(host, 50.0 + 10 * rank, share=0.5, limit_bytes=limit)
        model = wrapped(one.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        on = one.enable() if enabled else None
        answer = answers[way] = {"losses": []}
        tried = set()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier", "send", "recv"):
                if enabled and wrapper == "ddp":  # which uses none of these in a step
                    patch.setattr(distributed, name, refused)
            for number in range(MOST_STEPS if enabled else max(len(each["losses"]) for each in answers.values())):
                optimizer.zero_grad()
                for kernel, count in zip(one.made.operators(), (2, 3)):
                    if kernel is None:  # PyTorch's own operator is registered, which knows no clock
                        one.program.passed_ms += count * one.program.baseline_ms
                loss = model(one.x + rank).square().mean()
                loss.backward()
                one.program.passed_ms += one.program.idle_ms
                optimizer.step()
                answer["losses"].append(loss.item())
                if enabled and one.tuner.trials:
                    tried.add(one.made._tracker.steps % 3)
                if enabled:
                    one.wait_for_threads()
                    if number > 90 and number % 5 == 0 and settled(on):
                        break
        if on is not None:
            with on:
                (report,) = on.report().tuned
                answer["tuned"] = [report.phase, len(report.kernels), sorted(tried), on.report().calls]
                answer["why"] = report.gain, report.outcomes
            one.source.join(30)
        del model, optimizer
finally:
    distributed.destroy_process_group()
print(json.dumps(answers), flush=True)
if wrapper == "fsdp":
    os._exit(0)  # it keeps groups until Python ends, and so the threads of Gloo: see tests/support/ranks.py
"""


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_ranks_tune_in_the_same_steps_and_train_as_before(host, tmp_path, wrapper):
    if not torch.distributed.is_available():
        pytest.skip("PyTorch without torch.distributed")
    found = run_forked_ranks(RANK, tmp_path / "store", host.stub._name, wrapper)
    assert [status for _, _, status in found] == [0, 0], "".join(errors for _, errors, _ in found)
    answers = [json.loads(output) for output, *_ in found]
    for way in ("auto", "stated"):
        for each in answers:
            phase, kernels, _, calls = each[way]["tuned"]
            assert phase == "settled", way
            assert kernels >= 4, (way, each[way]["why"])
            assert calls > 0, way
            ours, baseline = (torch.tensor(each[name]["losses"]) for name in (way, "baseline"))
            torch.testing.assert_close(ours, baseline[: len(ours)], rtol=1e-4, atol=1e-6)
        (tried, others) = (each[way]["tuned"][2] for each in answers)
        assert tried == others, way
        assert len(tried) == 1, f"{way}: every third step"
