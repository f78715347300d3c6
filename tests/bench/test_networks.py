"""bench.torch.networks on the CPU: cells are kept, made void, measured ahead, ended and drawn."""

import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from time import monotonic, sleep, time

import pytest

from bench.tools.processors import for_preparing, shares, siblings_of
from bench.tools.results import ROOT, load, save
from bench.torch import network_code

pytest.importorskip("torch")

import torch

from bench.torch import network_gpu, network_summary, networks
from bench.torch.network_order import Cell, Durations, groups, progress
from tests.support.nvml_driver import NvmlDriver

OPTIONS = ["--backend", "cpu", "--network", "small", "--steps", "2"]


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the script and returns what the script prints.

    The script runs in this process, because PyTorch is imported here already. Cells have processes of their own.
    """
    at_its_end = signal.getsignal(signal.SIGTERM)

    def run_script(out, *options):
        own = ["--tuning-seconds", "1", "--cell-seconds", "500", "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["networks", *OPTIONS, *own, *options])
        networks.main()
        return capsys.readouterr()

    yield run_script
    signal.signal(signal.SIGTERM, at_its_end)


@pytest.mark.long
def test_a_second_call_measures_only_what_is_missing_and_what_is_void(run, tmp_path):
    out = tmp_path / "networks.json"
    settings = ("--setting", "stock", "--setting", "64KiB")
    done = run(out, *settings)
    assert re.search(r"stock 0: step .* ms, first .* s; process \d+ s; left: 1 cells of about \d+ s", done.err)
    told = r"64KiB 0: step .*; 64KiB \d+\.\d{3} of stock \(1, 1\); process \d+ s; left: 0 cells of about 0 s; 2 of 2"
    assert re.search(told, done.err)
    cases = load(out)["cases"]
    assert set(cases) == {"small nchw stock 0", "small nchw 64KiB 0"}
    assert all("error" not in case for case in cases.values()), cases
    assert cases["small nchw 64KiB 0"]["kinds"]["looked up"] > 0
    assert len(cases["small nchw stock 0"]["losses"]) == 3
    codes = load(networks.code_path(out))["cases"]
    ours = codes[cases["small nchw 64KiB 0"]["digest"]]
    assert codes[cases["small nchw stock 0"]["digest"]] == network_code.digests("small", [])
    assert {"ucudnn/handle.py", "ucudnn/torch/gate/src/call_gate.cpp", *network_code.digests("small", [])} < set(ours)
    assert networks.void(out) == {}
    ours["ucudnn/handle.py"] = "that of other code"
    cases["small nchw stock 0"]["kept"] = True
    save(networks.code_path(out), {"cases": codes})
    save(out, {"cases": cases})
    assert networks.void(out) == {"small nchw 64KiB 0": ["ucudnn/handle.py"]}
    done = run(out, *settings)
    again = load(out)["cases"]
    assert again["small nchw stock 0"]["kept"]
    assert networks.void(out) == {}
    assert "| small | nchw | 64KiB |" in done.out


@pytest.mark.long
def test_repeats_take_the_database_of_the_first_process_and_say_so(run, tmp_path):
    out = tmp_path / "networks.json"
    settings = ("--setting", "64KiB-first", "--setting", "stock")
    run(out, *settings, "--repeats", "2", "--gpus", "2", "--keep-databases")
    cases = load(out)["cases"]
    assert [case.get("error") for case in cases.values()] == [None] * 4
    assert cases["small nchw 64KiB-first 0"]["database"] == "empty"
    assert cases["small nchw 64KiB-first 1"]["database"] == "kept"
    assert {case["gpu"] for case in cases.values()} in ({0}, {1}), "all cells of a network run on one GPU"
    assert list(cases) == [f"small nchw {each}" for each in ("64KiB-first 0", "stock 0", "stock 1", "64KiB-first 1")]
    (found,) = network_summary.comparisons(cases)
    assert len(found.ours) == len(found.stock) == 2
    assert found.first == [cases["small nchw 64KiB-first 0"]]


def test_an_error_is_kept_and_not_measured_again_unless_asked(run, tmp_path):
    out = tmp_path / "networks.json"
    done = run(out, "--setting", "nonsense")
    (case,) = load(out)["cases"].values()
    assert case["error"].startswith("SettingsError: ")
    assert f"small nchw nonsense 0: {case['error']}" in done.out
    assert '  File "torch/__init__.py", line' in "\n".join(case["warnings"])
    arguments = Namespace(row=None, network=["small"], form=None, setting=["nonsense"], repeats=1, again=False)
    assert networks.missing(arguments, out, ()) == []
    arguments.again = True
    assert list(map(str, networks.missing(arguments, out, ()))) == ["small nchw nonsense 0"]


def children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(each) for each in found.stdout.split()]


def state(pid):
    return subprocess.run(
        ["ps", "-o", "stat=,args=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_call_that_is_ended_keeps_what_was_done_and_leaves_no_process(number, tmp_path):
    out = tmp_path / "networks.json"
    command = [sys.executable, "-m", "bench.torch.networks", *OPTIONS, "--tuning-seconds", "60", "--out", str(out)]
    command += ["--setting", "stock", "--setting", "64KiB", "--repeats", "20"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        begin = monotonic()
        while not out.exists() and monotonic() - begin < 600:
            sleep(0.05)
        mine = children(process.pid)
        assert mine, "one measures, and one prepares"
        process.send_signal(number)
        process.communicate(timeout=300)
    assert process.returncode
    assert not [each for each in map(state, mine) if each], "it has waited for their ends"
    cases = load(out)["cases"]
    assert cases
    assert all("error" not in case for case in cases.values()), "what was ended is not kept as an error"


def test_a_cell_that_waits_ends_with_the_process_that_started_it():
    command = [sys.executable, "-m", "bench.torch.network_cell", "--network", "small", "--backend", "cpu", "--wait"]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "nobody waits for the answer" in done.stderr
    assert done.stdout == ""


@pytest.mark.long
def test_repeats_begin_with_an_empty_database_and_prepare_on_processors_of_their_own(run, tmp_path):
    cores = os.sched_getaffinity(0)
    preparing = for_preparing(cores, 1)
    if not preparing:
        pytest.skip("there is one processor, or all share a core")
    out = tmp_path / "networks.json"
    run(out, "--setting", "64KiB", "--repeats", "2", "--preparing-cores", "1")
    first, second = load(out)["cases"].values()
    assert [first["database"], second["database"]] == ["empty", "empty"]
    assert second["cores"] == {"prepared": sorted(preparing), "measured": sorted(cores - preparing)}
    turns = first["by_turns"]
    assert len(turns["stock_ms"]) == len(turns["ours_ms"]) + 1 >= 6, "each turn is between two of PyTorch's"
    for middle, quartiles in (("over_us", "quartiles_us"), ("step", "step_quartiles")):
        assert turns[quartiles][0] <= turns[middle] <= turns[quartiles][1]
    assert all(each > 0 for each in (*turns["steps_ms"], *turns["stock_steps_ms"]))
    assert second["by_turns"] == {}, "once for all repeats"
    for case in (first, second):
        assert list(case["spent_s"])[:3] == ["imports", "model", "waiting"]
        assert all(seconds >= 0 for seconds in case["spent_s"].values())
        measured = [seconds for part, seconds in case["spent_s"].items() if part not in ("imports", "model", "waiting")]
        assert case["first_step_s"] < sum(measured) < case["process_s"]
    assert os.sched_getaffinity(0) == cores


def test_processors_are_parted_only_where_there_are_enough():
    def alone(core):
        return {core}

    assert for_preparing(range(7), None, alone) == set()
    assert for_preparing(range(16), None, alone) == {14, 15}
    assert for_preparing({3, 5, 7}, 2, alone) == {5, 7}
    assert for_preparing({3}, 1, alone) == set()
    assert for_preparing(range(16), 0, alone) == set()


def test_processors_that_share_a_core_are_not_parted():
    def shared(core):
        return {core % 8, core % 8 + 8}

    assert for_preparing(range(16), None, shared) == {7, 15}
    assert for_preparing(range(16), 3, shared) == {6, 7, 14, 15}
    assert for_preparing({0, 8}, 1, shared) == set()
    assert for_preparing({0, 1, 8}, 1, shared) == {0, 8}
    assert siblings_of(10**9) == {10**9}
    core = min(os.sched_getaffinity(0))
    assert core in siblings_of(core)


def test_gpus_measure_on_processors_of_their_own():
    def shared(core):
        return {core % 8, core % 8 + 8}

    assert shares(range(16), 4, shared) == [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]
    assert shares({*range(14)} - {6, 7}, 2, shared) == [{0, 1, 2, 8, 9, 10}, {3, 4, 5, 11, 12, 13}]
    assert shares({0, 1, 8}, 3, shared) == [{0, 1, 8}] * 3, "there are too few for parts"


def test_nothing_is_imported_between_the_turn_and_the_first_step():
    code = """
import sys
from argparse import Namespace
import torch
from bench.torch import network_cell
arguments = Namespace(network="small", form="bf16", wait=False)
model = network_cell.prepared(arguments, network_cell.Spent())
known = set(sys.modules)
network_cell.step_of(arguments, torch.device("cpu"), model)
print(sorted(set(sys.modules) - known))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_nothing_starts_that_might_not_end_in_time(run, tmp_path):
    done = run(tmp_path / "networks.json", "--limit-seconds", "1")
    assert not (tmp_path / "networks.json").exists()
    assert re.search(
        r"s are left, too few for 5 cells of about 2500 s; 0 of 3 comparisons complete: call again", done.err
    )


@pytest.mark.long
def test_what_fits_into_the_rest_is_measured_and_what_takes_longer_is_not(run, tmp_path):
    out = tmp_path / "networks.json"
    known = {"stock 0": 499, "64KiB 3": 4}  # the second one is no cell of this call
    cases = {name: {**case_of(1.0), "process_s": seconds, "digest": "other"} for name, seconds in known.items()}
    save(out, {"cases": {f"small nchw {name}": case for name, case in cases.items()}})
    done = run(out, "--setting", "stock", "--setting", "64KiB", "--limit-seconds", "400")
    cases = load(out)["cases"]
    assert cases["small nchw 64KiB 0"]["losses"]
    assert cases["small nchw stock 0"]["digest"] == "other"
    assert re.search(
        r"s are left, too few for 1 cells of about 499 s; 1 of 2 comparisons complete: call again", done.err
    )
    shown = run(out, "--setting", "stock", "--repeats", "2", "--summary")
    assert "to be measured: 2 cells of about 998 s" in shown.out
    assert load(out)["cases"] == cases


def test_all_repeats_of_a_comparison_come_before_the_next_one_and_settings_alternate():
    arguments = Namespace(row=None, network=["vgg16", "resnet50"], form=["nchw", "bf16"], setting=None, repeats=2)
    found = groups(networks.cells(arguments))
    pairs = [(network, form) for network in ("vgg16", "resnet50") for form in ("nchw", "bf16")]
    expected = []
    for settings in (("stock", "auto"), ("stock-off", "auto-off"), ("64MiB",)):
        for pair in pairs:
            for repeat in range(2):
                members = list(reversed(settings) if repeat else settings)
                expected += [[Cell(*pair, each, repeat) for each in members]]
    assert found == expected


def test_rows_take_the_place_of_networks_and_forms():
    rows = [networks.row("small:bf16"), networks.row("vgg16:last")]
    arguments = Namespace(row=rows, network=["small"], form=["nchw"], setting=["stock", "auto"], repeats=1)
    names = [f"{row} {setting} 0" for row in ("small bf16", "vgg16 last") for setting in ("stock", "auto")]
    assert list(map(str, networks.cells(arguments))) == names


@pytest.mark.parametrize("text", ["small", "small:", "small:int8", "alexnet:nchw", ":nchw"])
def test_a_row_that_does_not_exist_is_refused_with_all_that_do(run, capsys, tmp_path, text):
    with pytest.raises(SystemExit):
        run(tmp_path / "networks.json", "--row", text)
    assert f"{text}: give NETWORK:FORM, of resnet50, " in capsys.readouterr().err


def test_what_lacks_the_fewest_cells_comes_before_what_is_not_begun():
    arguments = Namespace(row=None, network=["vgg16", "resnet50", "unet2d"], form=None, setting=None, repeats=3)
    every = list(networks.cells(arguments))
    kept = {
        *("resnet50 nchw stock 0", "unet2d nchw stock 0", "unet2d nchw auto 0", "unet2d nchw auto 1"),
        *(f"vgg16 nchw {setting}-off {repeat}" for setting in ("stock", "auto") for repeat in range(3)),
    }
    left = [cell for cell in every if str(cell) not in kept]
    names = [[str(cell) for cell in group] for group in groups(left)]
    assert names[:3] == [
        ["unet2d nchw stock 1"],
        ["unet2d nchw stock 2", "unet2d nchw auto 2"],
        ["resnet50 nchw auto 0"],
    ]
    limits = [Cell("vgg16", "nchw", each, 0) for each in ("64MiB", "stock", "stock-off")]
    assert groups(limits) == [limits[2:], limits[:1], limits[1:2]], (
        "PyTorch alone alternates with what is left to compare with it"
    )
    assert progress(every, left) == "1 of 9 comparisons complete"
    assert progress(every, []) == "9 of 9 comparisons complete"


def test_what_is_compared_is_measured_together_unless_it_was_measured_just_now(tmp_path):
    out = tmp_path / "networks.json"
    settings = ["stock", "auto", "64MiB"]
    arguments = Namespace(row=None, network=["vgg16"], form=None, setting=settings, repeats=2, again=False)
    old, new = {"ended_unix_s": time() - 7200}, {"ended_unix_s": time() - 60}

    def left(**kept):
        save(out, {"cases": {f"vgg16 nchw {name.replace('_', ' ')}": case for name, case in kept.items()}})
        return [str(cell).removeprefix("vgg16 nchw ") for cell in networks.missing(arguments, out, ())]

    limited = {"64MiB 0": old, "64MiB 1": old}
    pairs = {"stock 0": old, "auto 0": old, "auto 1": new}
    assert left(**pairs, **limited) == ["stock 1"], "the other one was measured just now"
    assert left(**{**pairs, "auto 1": old}, **limited) == ["auto 1", "stock 1"], "repeat 0 is complete"
    assert left(**{**pairs, "auto 1": {}}, **limited) == ["auto 1", "stock 1"], "nobody knows when"
    assert left(**{**pairs, "auto 1": {"error": "no module", **old}}, **limited) == ["stock 1"]
    alone = {"stock 0": old, "auto 0": old, "stock 1": old, "auto 1": old}
    assert left(**alone, **{"64MiB 0": old}) == ["64MiB 1"], "limits go without PyTorch alone"
    assert left(**alone, **limited) == []
    assert left(**{**alone, "auto 1": new}, **limited) == ["stock 1"], "a call was stopped between the two"
    assert left(**{**alone, "stock 0": {}}, **limited) == ["stock 0"], "it is older than what names its time"
    assert left(**{name: {} for name in {**alone, **limited}}) == [], "nobody knows that they are apart"


def test_the_summary_says_where_the_time_of_processes_went():
    parts = {"imports": 5.0, "model": 1.0, "waiting": 30.0, "to device": 1.5, "first step": 4.0}
    cases = {
        "a nchw auto 0": {"spent_s": {**parts, "turns": 6.0}, "process_s": 13.0},
        "a nchw auto 1": {"spent_s": {**parts, "first step": 6.0}, "process_s": 9.0},
        "a nchw stock 0": {"error": "no module"},
    }
    (line,) = network_summary.spent(cases)
    assert line == "auto: seconds of a process 11.0: to device 1.5, first step 5.0, turns 3.0, the rest 1.5"


def test_durations_are_those_of_the_last_time_of_repeats_or_of_the_setting():
    def case(seconds):
        return {"process_s": seconds}

    kept = {"a nchw auto 0": case(40), "a nchw auto 1": case(60), "b nchw stock 0": case(8), "c nchw stock 0": case(16)}
    durations = Durations({**kept, "d nchw passed 0": {"error": "no module", "process_s": 1}}, 90)
    known, repeat, other, new = (
        Cell(*each) for each in (("a", "nchw", "auto", 1), ("a", "nchw", "auto", 2), ("a", "bf16", "stock", 0),
                                 ("d", "nchw", "passed", 0))
    )  # fmt: skip
    assert [durations.of(each) for each in (known, repeat, other, new)] == [60, 50, 12, 90]
    assert [durations.most(each) for each in (known, repeat, other, new)] == [75, 75, 20, 90]  # repeats: 50 + 10
    durations.learn(new, 10)
    assert durations.of(new) == 10


def case_of(step_ms, **others):
    return {
        "step_ms": step_ms, "host_ms": 1.0, "first_step_s": 1.0, "tuning_s": 3.0, "kernels": 5,
        "tuning_steps": 100, "tuning_mean_ms": 12.0,
        "peaks": {"allocated": 2**20, "reserved": 2**21}, **others,
    }  # fmt: skip


def test_calls_with_different_gpus_do_not_wait_for_one_another(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert networks.visible(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,MIG-a/1/0")
    assert networks.visible(1) == ["2"]
    paths = [networks.lock_path(each) for each in networks.visible(2)]
    assert paths[0] != paths[1]
    assert all(each.parent.is_dir() for each in paths), "a name with slashes does not ask for folders"
    with pytest.raises(SystemExit, match=r"error: --gpus 3: CUDA_VISIBLE_DEVICES=2,MIG-a/1/0 names only 2"):
        networks.visible(3)


def test_what_all_steps_of_tuning_lost_stands_beside_what_trials_count():
    tuned = [{"lost_seconds": 0.1, "step_ms": 10.0, "kernels": []}]
    known = {"a nchw stock 0": case_of(10.0), "a nchw auto 0": case_of(9.0, tuned=tuned, database="empty")}
    (row,) = network_summary.rows(known)
    assert "| 0.10 (0.20) of 3 |" in row
    tuned[0]["step_ms"] = None
    (row,) = network_summary.rows(known)
    assert "| 0.10 (0.00) of 3 |" in row, "no step of the program's own is known"


def test_each_setting_has_a_mean_of_its_own(capsys):
    ours = {"auto": (5.0, 20.0), "64MiB": (12.0,)}
    cases = {f"{name} nchw stock 0": case_of(10.0) for name in "ab"}
    cases |= {
        f"{name} nchw {setting} 0": case_of(took)
        for setting, times in ours.items()
        for name, took in zip("ab", times, strict=False)
    }
    network_summary.show(cases, {})
    lines = capsys.readouterr().out.splitlines()
    assert [each for each in lines if "geometric mean" in each] == [
        "64MiB: geometric mean 1.2000 of 1 cells",
        "auto: geometric mean 1.0000 of 2 cells",
    ]


def test_processes_on_different_kinds_of_gpu_are_not_compared(capsys):
    h100, h200 = ({"conditions": {"device": f"NVIDIA {name}"}} for name in ("H100", "H200"))
    cases = {
        "a nchw stock 0": case_of(10.0, **h200),
        "a nchw stock 1": case_of(20.0, **h100),
        "a nchw auto 0": case_of(9.0, **h200),
        "b nchw stock 0": case_of(10.0, **h200),
        "b nchw auto 0": case_of(5.0, **h100),
    }
    (found,) = network_summary.comparisons(cases)
    assert (found.network, found.ratio) == ("a", pytest.approx(0.9))
    network_summary.show(cases, {})
    assert "not compared with each other: cells 3 on NVIDIA H200, 2 on NVIDIA H100" in capsys.readouterr().out


class ClockDriver(NvmlDriver):
    """A driver that tells clocks."""

    def nvmlDeviceGetClockInfo(self, handle, which, value):  # noqa: N802
        value._obj.value = {1: 1980, 2: 3201}[which]
        return 0

    def nvmlDeviceGetMaxClockInfo(self, handle, which, value):  # noqa: N802
        value._obj.value = {1: 1981, 2: 3202}[which]
        return 0

    def nvmlDeviceGetTemperature(self, handle, which, value):  # noqa: N802
        value._obj.value = 41
        return int(self.refuses == "temperature")


CLOCKS = {"sm_mhz": 1980, "memory_mhz": 3201, "most_sm_mhz": 1981, "most_memory_mhz": 3202}


@pytest.mark.parametrize(
    ("refuses", "expected"),
    [("", {**CLOCKS, "celsius": 41}), ("temperature", CLOCKS), ("handle", {})],
)
def test_a_cell_says_which_gpu_it_had_and_at_which_clocks(refuses, expected, monkeypatch):
    library = ClockDriver(refuses)
    monkeypatch.setattr(network_gpu.ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(network_gpu.torch.cuda, "get_device_properties", lambda _: Namespace(uuid="0123"))
    assert network_gpu.gpu_state(torch.device("cuda", 0)) == {"uuid": "GPU-0123", **expected}
    assert library.open == 0


def test_without_a_driver_only_the_gpu_is_named(monkeypatch):
    def missing(_):
        raise OSError("no such library")

    monkeypatch.setattr(network_gpu.ctypes, "CDLL", missing)
    assert network_gpu.readings("GPU-0123") == {}
    assert network_gpu.gpu_state(torch.device("cpu")) == {}


def _words_of(found):
    figure = network_summary._figure(found)
    (point,) = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert (point.get_markerfacecolor() == "white") == (not found[0].replaces)
    return figure.get_supxlabel()


def test_a_point_is_full_where_a_kernel_was_replaced():
    pytest.importorskip("matplotlib")
    tuned = [{"seen": 5, "kernels": [{"parts": 1}]}]
    (found,) = network_summary.comparisons({"a nchw stock 0": case_of(1.0), "a nchw auto 0": case_of(0.9, tuned=tuned)})
    assert _words_of([found]) == "time of a step over PyTorch's"


def test_the_hosts_time_is_that_by_turns_where_a_process_has_compared_it():
    cases = {"a nchw stock 0": case_of(1.0), "a nchw auto 0": case_of(1.0, host_ms=1.5, by_turns={})}
    (found,) = network_summary.comparisons(cases)
    assert found.host_us == pytest.approx(100.0), "half a millisecond more for five kernels"
    cases["a nchw auto 1"] = case_of(1.0, host_ms=1.5, by_turns={"over_us": 3.0})
    (found,) = network_summary.comparisons(cases)
    assert found.host_us == 3.0
    assert found.by_turns is None, "an earlier state of the script took no times of steps by turns"
    cases["a nchw auto 2"] = case_of(1.0, by_turns={"over_us": 4.0, "step": 1.01, "step_quartiles": [0.99, 1.02]})
    (found,) = network_summary.comparisons(cases)
    assert (found.host_us, found.by_turns) == (3.5, (0.99, 1.01, 1.02))
    assert "| 1.010 (0.99 to 1.02) |" in next(network_summary.rows(cases))
    pytest.importorskip("matplotlib")
    assert "crosses: by turns in one process" in _words_of([found])
    (cross,) = [each for each in network_summary._figure([found]).axes[0].lines if each.get_marker() == "x"]
    assert list(cross.get_xdata()) == [1.01]


def test_losers_come_first_and_first_steps_are_those_with_empty_databases(tmp_path):
    cases = {
        "a nchw stock 0": case_of(10.0),
        "a nchw stock 1": case_of(11.0),
        "a nchw stock 2": case_of(10.5),
        "a nchw auto 0": case_of(9.0, database="empty", first_step_s=4.0),
        "a nchw auto 1": case_of(10.0, database="kept", first_step_s=2.0),
        "a nchw stock-off 0": case_of(20.0),
        "a nchw auto-off 0": case_of(22.0, peaks={"allocated": 3 * 2**20, "reserved": 2**20}),
        "b nchw auto 0": case_of(1.0),
        "c nchw stock 0": {"error": "no module"},
        "c nchw auto 0": case_of(1.0),
    }
    off, on = network_summary.comparisons(cases)
    assert (off.setting, on.setting) == ("auto-off", "auto")
    assert off.ratio == pytest.approx(1.1)
    assert on.ratio == pytest.approx(9.5 / 10.5)
    assert off.band is None
    assert on.band == pytest.approx((10 / 10.5, 11 / 10.5))
    assert on.first_step_s == 4.0
    assert off.more_bytes("allocated") == 2 * 2**20
    assert off.more_bytes("reserved") == -(2**20)
    pytest.importorskip("matplotlib")
    explained = [_words_of([each]) for each in (off, on)]
    assert explained == [
        "time of a step over PyTorch's; hollow: no kernel was replaced; orange: above 1.02 and above the grey",
        "time of a step over PyTorch's; grey: PyTorch's own processes; small points: single processes\n"
        "hollow: no kernel was replaced",
    ]
    for some in (cases, {name: case for name, case in cases.items() if "-off" in name}):
        network_summary.draw(some, tmp_path / "networks.png")
        assert (tmp_path / "networks.png").stat().st_size > 5000
