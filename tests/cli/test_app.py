"""The command line: planning, and what commands hand over to one another in files."""

import io
import json
import re
import sqlite3
import subprocess
import sys
import warnings
from contextlib import closing
from pathlib import Path

import pytest
import typer

from ucudnn.cli import app
from ucudnn.networks.tables import CSV_HEADER, NETWORKS, load_network


@pytest.fixture
def plan(call):
    """Return a function that returns the plan of a command line."""

    def made(*arguments):
        status, out, error = call("plan", *arguments, "--json")
        assert status == 0, error
        return json.loads(out)

    return made


@pytest.mark.parametrize(("candidates", "micro_batched_ms"), [("graph", 11.69), ("legacy", 16.51)])
def test_plans_for_a_recorded_gpu(plan, h200_every, candidates, micro_batched_ms):
    answer = plan("alexnet", "--profile", str(h200_every), "--workspace", "64MiB", "--candidates", candidates)
    assert answer["total"]["micro_batched_ms"] == pytest.approx(micro_batched_ms, abs=0.005)


def test_json_has_the_fields_of_the_readme(plan):
    answer = plan("alexnet", "--profile", "h200", "--workspace", "64MiB")
    assert {"network", "batch", "limits", "policy", "kernels", "total"} <= set(answer)
    assert (answer["network"], answer["batch"], answer["policy"]) == ("alexnet", 256, "powerOfTwo")
    assert answer["limits"] == {"workspace_bytes": 64 * 2**20, "total_workspace_bytes": None}
    assert len(answer["kernels"]) == 15
    kernel = answer["kernels"][3]
    assert (kernel["layer"], kernel["operation"], kernel["count"]) == ("conv2", "Forward", 1)
    assert kernel["configuration"].startswith("4x64 eng67")
    assert kernel["workspace_bytes"] <= 64 * 2**20
    assert {"undivided_ms", "micro_batched_ms", "speedup", "workspace_bytes"} <= set(answer["total"])
    counted = sum(kernel["micro_batched_ms"] * kernel["count"] for kernel in answer["kernels"])
    assert answer["total"]["micro_batched_ms"] == pytest.approx(counted)


@pytest.mark.parametrize("network", NETWORKS)
def test_the_shipped_profile_has_plans_of_every_known_network_at_three_mini_batches(plan, network):
    default = plan(network, "--profile", "h200", "--workspace", "64MiB")
    assert default["batch"] == load_network(network).batch
    for batch in (default["batch"], default["batch"] // 2, default["batch"] // 4):
        for limit in (("--workspace", "64MiB"), ("--total-workspace", "1GiB")):
            answer = plan(network, "--profile", "h200", "--batch", str(batch), "--policy", "undivided", *limit)
            assert (answer["network"], answer["batch"]) == (network, batch)
            assert answer["total"]["undivided_ms"] > 0


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("layout", ["first", "last"])
def test_plans_in_other_types_and_layouts(plan, dtype, layout):
    answer = plan("resnet18", "--profile", "h200", "--dtype", dtype, "--layout", layout, "--workspace", "32MiB")
    text = f"{dtype} {'NHWC' if layout == 'last' else 'NCHW'}"
    assert all(kernel["problem"].endswith(text) for kernel in answer["kernels"])
    assert answer["total"]["micro_batched_ms"] <= answer["total"]["undivided_ms"]


def test_only_branches_need_segments_of_their_own(plan, call):
    _, text, _ = call("plan", "inception3", "--profile", "h200", "--total-workspace", "64MiB", "--branches")
    assert "WD, 64 MiB in total, divided among branches that run at the same time" in text
    ways = re.search(r"the same total in other ways: WR (.*), WD (.*) ms, WD, grouped (.*) ms, shared (.*) ms", text)
    assert ways[1] == "does not fit" or float(ways[1].removesuffix(" ms")) >= float(ways[2])
    assert float(ways[2]) > float(ways[3]) >= float(ways[4])
    answer = plan("inception3", "--profile", "h200", "--total-workspace", "64MiB", "--branches")
    assert answer["division"]["arena_bytes"] <= 64 * 2**20
    assert answer["division"]["gap"] == 0


def test_options_win_over_the_environment_of_a_command(plan, monkeypatch):
    monkeypatch.setenv("UCUDNN_BACKEND", "replay:h200")
    monkeypatch.setenv("UCUDNN_DEFAULT_WORKSPACE_LIMIT", "16MiB")
    assert plan("alexnet")["limits"]["workspace_bytes"] == 16 * 2**20
    assert plan("alexnet", "--workspace", "64MiB")["limits"]["workspace_bytes"] == 64 * 2**20


@pytest.fixture
def layers(tmp_path):
    path = tmp_path / "tiny.csv"
    path.write_text(f"{CSV_HEADER}\nnet,12,10,4,6,8,3,3,1,1,1,1\nnet,12,10,4,6,8,5,3,2,1,2,1\n")
    return str(path)


@pytest.fixture
def ucudnn(call):
    """Return a function that returns what a command prints, which must end well."""

    def printed(*arguments):
        status, out, error = call(*arguments)
        assert status == 0, error
        return out

    return printed


def test_time_executes_what_it_plans(ucudnn, layers):
    answer = json.loads(ucudnn("time", layers, "--workspace", "30KiB", "--json", "--time-limit", "5"))
    assert answer["backend"] == "cpu"
    assert answer["batch"] == 6
    assert len(answer["kernels"]) == 6
    for kernel in answer["kernels"]:
        assert kernel["executed_ms"] > 0
        assert kernel["undivided_executed_ms"] > 0
        assert kernel["workspace_bytes"] <= 30 * 1024
    assert answer["total"]["executed_speedup"] > 0


def test_time_divides_a_total_too(ucudnn, layers):
    out = ucudnn("time", layers, "--total-workspace", "100KiB", "--policy", "all", "--time-limit", "1")
    assert "WD, 100 KiB in total" in out
    assert "executed: undivided" in out


BAD = """
plan lenet | network 'lenet' is neither known nor a file
plan alexnet --profile b200 | profile 'b200' is neither a file
PLAN --batch 0 | batch 0 must be 1 or more
PLAN --batch 100 | at mini-batches of 1, 2, 4, 8, 16, 32, 64, 128, 256, and not of 100
PLAN --total-workspace 64MiB --branches | --branches: alexnet has none; inception3 does
PLAN --solver-time-limit 0 | must be more than 0 seconds
PLAN --dtype int8 | --dtype='int8' is not known
PLAN --layout CHWN | --layout='CHWN' is not known: give first
PLAN --dtype float64 | has no Forward
PLAN --policy half | policy='half' is not known
PLAN --candidates all | candidates='all' is not known
PLAN --workspace 64MoB | size '64MoB' cannot be read
plan alexnet --backend gpu | backend='gpu' is not known
time alexnet --backend replay:h200 | plans but cannot execute
plan alexnet --tiles 4 | No such option: --tiles
plan | Missing argument
cache show --database off | the database is off: give --database PATH
desirable alexnet | error: desirable is a command of plot: type ucudnn plot desirable
why resnet50 | error: why is a command of memory: type ucudnn memory why
plann alexnet | Did you mean 'plan'?
"""


@pytest.mark.parametrize("line", BAD.strip().splitlines())
def test_bad_input_ends_with_status_2_and_one_clear_message(call, line):
    arguments, message = line.split(" | ")
    status, out, error = call(*arguments.replace("PLAN", "plan alexnet --profile h200").split())
    assert status == 2
    assert message in error
    assert "Traceback" not in error
    assert out == ""


def test_a_bad_variable_is_named(call, monkeypatch):
    monkeypatch.setenv("UCUDNN_SOLVER", "abacus")
    status, _, error = call("plan", "alexnet")
    assert status == 2
    assert "UCUDNN_SOLVER='abacus' is not known: give one of auto, highs" in error


def test_every_command_of_a_group_is_known_without_its_module():
    root = typer.main.get_command(app.app)
    for group, names in app._GROUPED.items():
        assert {*root.commands[group].commands} - {*root.commands} == {*names.split()}


def test_a_warning_is_one_line_without_a_place_in_the_source(call):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        status, _, error = call("plan", "alexnet", "--profile", "h200", "--workspace", "64", "--json")
    assert status == 0
    assert error == "warning: --workspace=64 is 64 bytes: write 64MiB if you mean MiB\n"


def test_the_version_is_told():
    done = subprocess.run([sys.executable, "-m", "ucudnn", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip().count(".") == 2  # a process, as people run it


@pytest.fixture
def database(tmp_path):
    return str(tmp_path / "measurements.db")


def test_profile_records_and_plan_replays(ucudnn, layers, tmp_path, database):
    out = str(tmp_path / "mine.json")
    quick = ["--backend", "cpu", "--policy", "powerOfTwo", "--database", database]
    assert "measurements of" in ucudnn(
        "profile", layers, "--out", out, *quick, "--dtype", "float32", "--dtype", "float64"
    )
    planned = ucudnn("plan", layers, "--profile", out, "--workspace", "1MiB", "--json")
    assert json.loads(planned)["total"]["speedup"] >= 1
    before = Path(out).read_text()
    ucudnn("profile", layers, "--out", out, *quick)  # adds to the file, from the database
    assert len(Path(out).read_text()) >= len(before) * 0.9


def rows_of(database):
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute("SELECT * FROM measurements").fetchall()


def test_profiles_move_between_databases(ucudnn, layers, tmp_path, database):
    other, moved = str(tmp_path / "other.db"), str(tmp_path / "moved.json")
    quick = ["--backend", "cpu", "--database", database]
    ucudnn("time", layers, *quick, "--repeats", "1", "--time-limit", "1")
    exported, imported = (
        int(ucudnn("profile", *words).split()[0])
        for words in (["--export", moved, *quick], ["--import", moved, "--database", other])
    )
    assert exported == imported > 0
    ucudnn("plan", layers, "--backend", "cpu", "--database", other, "--json")
    assert len(rows_of(other)) == imported, "nothing was measured"


def test_a_profile_of_another_machine_is_refused_before_anything_is_measured(call, ucudnn, layers, database, tmp_path):
    out = tmp_path / "other.json"
    options = ["--backend", "cpu", "--policy", "undivided", "--out", str(out), "--database", database]
    ucudnn("profile", layers, *options)
    out.write_text(out.read_text().replace('"cpus": "', '"cpus": "9'))
    before = rows_of(database), out.read_text()
    status, _, error = call("profile", layers, "--batch", "2", *options)
    assert status == 2
    assert "record to another file" in error
    assert (rows_of(database), out.read_text()) == before


def test_a_second_plan_measures_nothing(ucudnn, layers, database):
    command = [layers, "--backend", "cpu", "--database", database, "--json"]
    first = json.loads(ucudnn("time", *command, "--repeats", "1", "--time-limit", "5"))
    before = rows_of(database)
    # Only a plan measures nothing for sure: `time` measures again what it executes far from its prediction.
    second = json.loads(ucudnn("plan", *command))
    assert rows_of(database) == before
    configurations = [[kernel["configuration"] for kernel in each["kernels"]] for each in (first, second)]
    assert configurations[0] == configurations[1]


def test_cache_shows_checks_prunes_and_clears(call, ucudnn, monkeypatch, layers, database):
    def cache(command, *options):
        return ucudnn("cache", command, "--database", database, *options)

    ucudnn("time", layers, "--backend", "cpu", "--database", database, "--repeats", "1", "--time-limit", "1")
    assert database in cache("show").replace("\n", "")
    assert "measurements of" in cache("show")
    (machine,) = json.loads(cache("show", "--json"))["machines"]
    assert machine["measurements"] > 0
    assert "is sound" in cache("check")
    assert "0 measurements deleted" in cache("prune")
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # nobody says yes
    assert call("cache", "clear", "--database", database)[0] == 1
    assert f"{machine['measurements'] + machine['failures']} measurements deleted" in cache("clear", "--yes")
    assert "nothing is in it" in cache("show")


def test_plans_are_saved_and_loaded(plan, tmp_path):
    path = str(tmp_path / "plans.json")
    for limit in (["--workspace", "16MiB"], ["--total-workspace", "300MiB"]):
        command = ["resnet18", "--profile", "h200", *limit]
        made, taken = plan(*command, "--save-plans", path), plan(*command, "--plans", path)
        assert {each["origin"] for each in taken["kernels"]} == {"file"}
        shown = ("layer", "operation", "count", "configuration", "workspace_bytes", "micro_batched_ms")
        assert sorted([each[name] for name in shown] for each in taken["kernels"]) == sorted(
            [each[name] for name in shown] for each in made["kernels"]
        )
