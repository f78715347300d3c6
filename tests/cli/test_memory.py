"""`ucudnn memory`: explanations and tables of plans for shipped steps, and one line where a request is impossible."""

import csv
import io
import json
import re
from contextlib import contextmanager
from functools import partial

import pytest

from tests.support.nnunet import write_plans
from tests.support.saved_files import save_step
from tests.support.step_graphs import StepBuilder
from ucudnn.cli import torch_model
from ucudnn.memory.step.graph import Role
from ucudnn.memory.step.shipped import open_step

GIB = 2**30


@pytest.fixture
def memory(call, monkeypatch, tmp_path):
    """Run `ucudnn memory` in an empty folder; return exit status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    return partial(call, "memory")


def answer(result):
    status, out, error = result
    assert status == 0, error
    return json.loads(out)


@pytest.fixture
def measured(tmp_path):
    """Write a step of two operations that was measured at a mini-batch of 4."""
    builder = StepBuilder().storage("w", 0, Role.PARAMETER, fixed=100)
    builder.run("a", "w", "y", time=2.0, scratch=8, module="first", source="m.py:1").backward("b", "y", "z", time=3.0)
    path = tmp_path / "measured.json"
    save_step(builder.graph(batch=4), path, builder.costs(memory_bytes=10_000))
    return str(path)


def test_auto_is_a_policy_whose_row_names_the_one_that_it_takes(memory):
    arguments = ("plan", "alexnet", "--budget", "1800MiB", "--policy")
    every = {
        row["policy"]: row for row in answer(memory(*arguments, "auto,swap-hidden,checkpoint", "--json"))["policies"]
    }
    (auto,) = (name for name in every if name.startswith("auto: "))
    assert next(iter(every)) == auto
    (alone,) = answer(memory(*arguments, auto.removeprefix("auto: "), "--json"))["policies"]
    assert every[auto]["time_ms"] == alone["time_ms"]
    assert every[auto]["time_ms"] <= min(row.get("time_ms", 1e9) for row in every.values())


@pytest.mark.parametrize(
    ("options", "things"), [(["--policy", "vdnn"], 10), (["--policy", "stock,swap", "--front", "--points", "3"], 8)]
)
def test_progress_moves_from_plan_to_plan_and_ends_with_the_last_one(memory, monkeypatch, measured, options, things):
    told = []

    @contextmanager
    def progress(title, total):
        assert title == "planning"
        told.append(total)
        yield lambda advance, what: told.append(advance)

    monkeypatch.setattr("ucudnn.cli.memory.progress", progress)
    status, _, error = memory("plan", measured, *options)
    assert status == 0, error
    assert told == [things, 0, *[1] * (things - 1)]


def test_why_shows_operation_layer_line_floor_and_what_fits(memory):
    status, out, _ = memory("why", "resnet50", "--batch", "256", "--budget", "80GiB")
    assert status == 0
    assert "resnet50, mini-batch 256, predicted for h200, not measured" in out
    for heading in ("by operation", "by layer", "by source line"):
        assert heading in out
    assert re.search(r"aten\.convolution +53 +10\.6 GiB +50\.8%", out)
    assert re.search(r"layer1 +119 +7\.66 GiB", out)
    assert re.search(r"bench/memory/models\.py:\d+ +144 +8\.40 GiB", out)
    assert "peak 20.9 GiB at operation 236 (threshold_backward, layer4.2.relu)" in out
    assert "floor 2.73 GiB, set by operation 458 (native_batch_norm_backward_52, bn1)" in out
    assert "smallest budget: floor 2.73 GiB, stock 20.9 GiB, checkpoint 6.63 GiB" in out
    assert re.search(r"largest mini-batch within 80 GiB: floor \d+, stock 9\d\d, checkpoint \d+", out)
    assert out.endswith("next: ucudnn memory plan resnet50 --budget 80GiB --batch 256\n")


def test_why_is_json_too(memory):
    found = answer(memory("why", "gpt2", "--json", "--budget", "24GiB", "--device", "h200"))
    assert found["peak"]["kind"] == "aten._log_softmax_backward_data"
    assert found["peak"]["source"].startswith("torch/nn/functional.py:")
    assert found["budget_bytes"] == 24 * GIB
    assert found["largest_batches"]["checkpoint"] > found["largest_batches"]["stock"] >= 8


@pytest.mark.parametrize("name", ["unet3d", "gpt2"])
def test_why_draws_who_owns_the_memory(memory, tmp_path, name):
    assert memory("why", name, "--json", "--plot", "peak.svg")[0] == 0
    text = " ".join(re.findall(r"<text[^>]*>([^<]+)</text>", (tmp_path / "peak.svg").read_text()))
    assert f"{name}, mini-batch" in text
    assert "saved by" in text
    assert "floor" in text
    assert "gradients of activations" in text
    assert "peak " in text
    assert {"forward", "backward", "optimizer"} <= {*text.split()}


def test_plan_compares_policies_within_a_budget(memory):
    status, out, _ = memory("plan", "vgg16", "--batch", "64", "--budget", "5.75GiB")
    assert status == 0
    assert "vgg16, mini-batch 64, predicted for rtx-3060, not measured, within 5.75 GiB" in out
    assert re.search(r"^checkpoint +[\d.]+ ms +[\d.]+% +[\d.]+ GiB +0 +[\d.]+ ms +0 ms +\+[\d.]+%", out, re.MULTILINE)
    assert re.search(r"^stock +needs [\d.]+ GiB", out, re.MULTILINE)
    assert re.search(
        r'^best: [\w-]+, [\d.]+% slower, [\d.]+ GiB of [\d.]+ GiB: .* budget="5888MiB", policy="', out, re.MULTILINE
    )


def test_plan_on_a_device_of_the_papers(memory):
    slow, fast = (
        answer(memory("plan", "vgg16", "--batch", "64", "--device", "titan-x", "--json", "--algorithms", choice))
        for choice in ("smallest", "fastest")
    )
    times = [found["policies"][0]["time_ms"] for found in (slow, fast)]
    assert times[0] > 1.8 * times[1]
    assert slow["policies"][0]["peak_bytes"] < fast["policies"][0]["peak_bytes"]
    assert slow["budget_bytes"] == 12 * GIB


def test_a_device_is_written_from_a_specification(memory):
    figures = ("--memory", "15.7GiB", "--flops", "48.7", "--tensor-flops", "97.5", "--bandwidth", "717", "--link", "25")
    status, out, _ = memory("device", "mine", *figures)
    assert (status, out) == (0, "mine is in mine.json: ucudnn memory plan resnet50 --device mine.json\n")
    found = answer(memory("plan", "resnet50", "--batch", "32", "--device", "mine.json", "--policy", "stock", "--json"))
    assert (found["device"], found["budget_bytes"]) == ("mine", int(15.7 * GIB))
    assert found["policies"][0]["time_ms"] > 20
    assert memory("device", "mine", *figures[:-1], "0")[0] == 2


def test_plan_prints_csv_and_draws(memory, tmp_path):
    status, out, _ = memory("plan", "alexnet", "--policy", "stock, checkpoint", "--csv", "--plot", "points.png")
    assert status == 0
    assert [row["policy"] for row in csv.DictReader(io.StringIO(out))] == ["stock", "checkpoint"]
    assert (tmp_path / "points.png").read_bytes().startswith(b"\x89PNG")


def test_front_draws_time_against_peak(memory, tmp_path):
    arguments = ("plan", "resnet50", "--batch", "32", "--front", "--points", "4", "--policy", "stock,checkpoint")
    plans = answer(memory(*arguments, "--json", "--plot", "front.svg"))["plans"]
    assert {each["policy"] for each in plans} == {"stock", "checkpoint"}
    assert len(plans) >= 4
    text = (tmp_path / "front.svg").read_text()
    assert "checkpoint" in text
    assert "peak in GiB" in text
    status, out, _ = memory(*arguments, "--csv")
    assert status == 0
    assert len([*csv.DictReader(io.StringIO(out))]) == len(plans)
    assert "checkpoint" in memory(*arguments)[1]


def test_a_measured_step_has_its_own_times(memory, measured):
    found = answer(memory("plan", measured, "--policy", "stock", "--json"))
    assert (found["device"], found["policies"][0]["time_ms"]) == ("test", 5.0)
    assert found["policies"][0]["peak_bytes"] == 100 + 40 + 40
    twice = answer(memory("plan", measured, "--policy", "stock", "--json", "--batch", "8"))
    assert twice["policies"][0]["time_ms"] == 10.0
    other = answer(memory("plan", measured, "--policy", "stock", "--json", "--device", "m40"))
    assert other["device"] == "m40"
    assert answer(memory("why", measured, "--json"))["peak"]["by"]["layer"][0]["name"] != ""


LONG = "n" * 300
IMPOSSIBLE = f"""
plan lenet | step 'lenet' is neither a file nor one that ships with ucudnn: alexnet
why resnet50 --device b200 | device 'b200' is neither a file nor one that ships
plan resnet50 --policy magic | policy 'magic' is not known: take one of stock, base, checkpoint
plan resnet50 --budget 2GiB --policy stock | of resnet50, 2.727 GiB, which operation 458
plan resnet50 --budget 2GiB --policy stock | (native_batch_norm_backward_52, bn1) sets: take a mini-batch of at most
plan resnet50 --budget 5GiB --policy stock | policy stock needs
plan resnet50 --budget lots | error: --budget: size 'lots' cannot be read
why resnet50 --budget -5 | error: --budget: size '-5' cannot be read
run torchvision:resnet50 --budget 12GX | error: --budget: size '12GX' cannot be read
plan resnet50 --budget 0 --policy stock | a budget of 0 bytes is below the floor of resnet50
why resnet50 --budget 0 | a budget of 0 bytes is below the floor of resnet50
plan resnet50 --batch 0 | a mini-batch of 0
plan resnet50 --algorithms best | algorithms 'best' are not known: take fastest or smallest
why resnet50 --shape 3x64x64 | --shape has no effect without a model, MODULE:CALLABLE
why resnet50 --divide | --divide has no effect without a model, MODULE:CALLABLE
plan resnet50 --points 5 | --points has no effect without --front
fits resnet50 --write x.json | --write has no effect without a plans file of nnU-Net
plan resnet50 --front --budget 1GiB | --budget has no effect with --front
plan resnet50 --policy joint --plan-seconds 1 | --plan-seconds has no effect without --policy auto
plan resnet50 --front --plan-seconds 1 | --plan-seconds has no effect with
plan resnet50 --json --csv | --csv has no effect with --json
why my_models.py:net | my_models.py:net: give a module in place of a file: my_models:net
why ./models/mine.py:net | give a module in place of a file: models.mine:net
plan resnet50 --policy no_such:Mine | cannot be loaded: No module named 'no_such': no such file in this folder
plan {LONG} | cannot be read: File name too long
why resnet50 --device {LONG} | cannot be read: File name too long
plan {LONG}:net --json --csv | --csv has no effect with --json
why resnet50 --plot peak.txt | peak.txt is no name of a picture
why resnet50 --plot no/peak.png | no/peak.png cannot be written: there is no folder no
record torchvision:resnet50 --out no/r50.json | no/r50.json cannot be written
"""


@pytest.mark.parametrize("line", IMPOSSIBLE.strip().splitlines(), ids=lambda line: line[:60])
def test_what_is_impossible_ends_in_one_line_and_status_2(memory, line):
    arguments, message = line.split(" | ")
    status, out, error = memory(*arguments.split())
    assert (status, out) == (2, "")
    progress = re.compile(r"planning 0 of 1, \d+ s: ")  # a busy machine prints it
    assert len([line for line in error.splitlines() if not progress.match(line)]) == 1
    assert message in " ".join(error.split())
    assert error.endswith("\n")


def test_a_measured_step_has_no_choice_of_algorithms_and_one_of_another_version_is_refused(memory, measured, tmp_path):
    path = tmp_path / "measured.json"
    status, _, error = memory("plan", measured, "--algorithms", "smallest")
    assert status == 2
    assert "--algorithms has no effect with a measured step without --device: leave it out" in error
    path.write_text(path.read_text().replace('"version": 1', '"version": 7'))
    status, _, error = memory("plan", str(path))
    assert status == 2
    assert "has version 7, this ucudnn reads version 1: record it again" in error


def test_a_snapshot_never_takes_the_place_of_what_the_command_reads(call, tmp_path):
    step, link = tmp_path / "step.json", tmp_path / "link.json"
    save_step(open_step("alexnet"), step)
    link.symlink_to(step)
    before = step.read_bytes()
    for path in (step, link):
        status, _, error = call("memory", "plan", str(step), "--policy", "vdnn-all-m", "--snapshot", str(path))
        assert (status, error.count("this command reads it; give another name")) == (2, 1)
    assert step.read_bytes() == before


@pytest.mark.slow
def test_auto_is_the_best_plan_so_far_when_its_seconds_are_over(memory):
    arguments = ["plan", "resnet50", "--policy", "auto", "--budget", "16GiB", "--json", "--plan-seconds"]
    first, best = (answer(memory(*arguments, seconds))["policies"][0] for seconds in ("0", "inf"))
    assert first["policy"] == "auto: checkpoint"
    assert best["time_ms"] < first["time_ms"]


def test_plan_for_more_gpus_than_there_are(memory, tmp_path):
    line = ("plan", "vgg16", "--policy", "auto,checkpoint", "--device", "h200", "--batch", "8")
    alone = answer(memory(*line, "--json"))
    found = answer(memory(*line, "--ranks", "8", "--json"))
    assert found["device"] == "8 ranks of h200"
    assert found["link"] == {"ranks": 8, "latency_ms": 0.01, "bytes_per_ms": 4.5e8, "source": "assumed for h200"}
    best, before = ({each["policy"].split(":")[0]: each for each in one["policies"]} for one in (found, alone))
    assert best["auto"]["peak_bytes"] < before["auto"]["peak_bytes"] - 2**29  # gradients and momentum are divided
    assert best["auto"]["time_ms"] > 0
    slow = answer(memory(*line, "--ranks", "64", "--link", "5", "--latency", "0.02", "--json"))
    assert slow["link"] == {"ranks": 64, "latency_ms": 0.02, "bytes_per_ms": 5e6, "source": "stated"}
    assert min(each["time_ms"] for each in slow["policies"]) > 553 / 5  # each parameter comes once at least, in ms
    status, out, error = memory(*line, "--ranks", "8", "--timeline", str(tmp_path / "queues.png"), "--policy", "auto")
    assert status == 0, error
    assert "predicted for 8 ranks of h200, not measured" in out
    assert "sharded over 8 ranks" in out
    assert "link: assumed for h200, 0.01 ms from rank to rank and 450 GB/s" in out
    assert memory(*line, "--link", "5")[0] == memory(*line, "--ranks", "1")[0] == 2


def test_plans_of_nnunet_say_what_is_missing(memory, monkeypatch, tmp_path):
    monkeypatch.setattr(torch_model, "find_spec", lambda _: None)
    plans = str(write_plans(tmp_path))
    for options, said in (
        ((), "give --configuration 3d_fullres"),
        (("--configuration", "3d_fullres"), "needs nnU-Net, which makes its network and loss: `pip install nnunetv2`"),
        (("--configuration", "3d_fullres", "--shape", "1x8"), "--shape has no effect without a model"),
        (("--configuration", "3d_fullres", "--write", "none/x.json"), "none"),
    ):
        status, out, error = memory("fits", plans, *options)
        assert (status, out) == (2, "")
        assert said in error
        assert len(error.splitlines()) == 1
