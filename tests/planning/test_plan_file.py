"""Files of plans: what is written is read, and what does not fit is refused by name."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.operands import PROBLEM
from tests.support.problems import make_problem, problems
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.errors import PlanFileError
from ucudnn.handle import Handle, save_plans
from ucudnn.kernel import Kernel, KernelKey
from ucudnn.planning.choices import Origin
from ucudnn.planning.plan_file import LoadedPlans, encode_plans, load_plans, read_plans
from ucudnn.problem import Operation
from ucudnn.profiles.measurement import Effort
from ucudnn.units import bytes_up

QUICK = Effort(repeats=1, time_limit_ms=1, warmup=0)


def opened(**options):
    return Handle(
        **({"backend": CpuBackend(), "effort": QUICK, "database": "off", "workspace_limit": 30_000} | options)
    )


def planned(handle, *kernels):
    """Plan problems, and return the decisions of a handle by layer and problem."""
    for layer, problem in kernels:
        handle.get_algorithm(problem, layer=layer)
    handle.optimize()
    return {(layer, problem): entry.decision for (layer, problem, *_), entry in handle._entries.items()}


KERNELS = [(f"conv{index}", PROBLEM.with_operation(each)) for index, each in enumerate(Operation)]


@pytest.fixture
def saved(tmp_path):
    """Return a file with plans of three kernels, and their decisions."""
    handle = opened()
    decisions = planned(handle, *KERNELS)
    handle.save_plans(tmp_path / "plans.json")
    return tmp_path / "plans.json", decisions


def edited(path, edit):
    """Write a file again after an edit of its content."""
    content = json.loads(path.read_bytes())
    edit(content)
    path.write_text(json.dumps(content))
    return path


def test_another_handle_takes_the_plans_and_measures_nothing(saved, monkeypatch):
    path, decisions = saved
    monkeypatch.setattr(CpuBackend, "bench", lambda *_: pytest.fail("a loaded plan needs no benchmark"))
    for handle in (opened(plans=path), opened()):
        handle.load_plans(str(path))
        found = planned(handle, *KERNELS)
        assert {key: each.configuration for key, each in found.items()} == {
            key: each.configuration for key, each in decisions.items()
        }
        assert {each.origin for each in found.values()} == {Origin.FILE}
        assert "not measured: 3 from a file of plans" in str(handle.report())


def test_plans_replace_earlier_ones(saved):
    need = CpuBackend().algorithm(PROBLEM.part(2), "GEMM").workspace_bytes
    path = edited(saved[0], change("plans", 0, "parts", to=[[2, "GEMM", 1.0, need, []]] * 3))
    assert need > 30_000
    handle = opened(policy="undivided", workspace_limit=0)
    before = planned(handle, *KERNELS)
    with pytest.raises(PlanFileError, match=rf"plan of conv0 .* of {bytes_up(need)}, and the limit is 0 bytes"):
        handle.load_plans(path)
    assert planned(handle) == before  # nothing changed, and the next kernel is planned as before
    (*_, late) = planned(handle, ("", make_problem())).values()
    assert late.origin is Origin.MEASURED
    roomy = opened(policy="undivided", workspace_limit=need)
    planned(roomy, *KERNELS)
    roomy.load_plans(path)
    found = [each.configuration for each in planned(roomy).values()]
    assert found == [each.configuration for each in read_plans(path).plans]
    assert str(found[0]) == "3x2 GEMM"


def test_a_kernel_that_the_file_lacks_is_planned_as_without_it(saved):
    handle = opened(plans=saved[0])
    (decision,) = planned(handle, ("", make_problem())).values()
    assert decision.origin is Origin.MEASURED
    (decision,) = planned(opened(plans=saved[0]), ("", make_problem(deterministic=True))).values()
    assert decision.origin is Origin.RULE


def test_a_plan_serves_another_layer_unless_plans_of_its_problem_differ(saved):
    plans = read_plans(saved[0]).plans
    other = Kernel(layer="another", problem=plans[0].kernel.problem)
    assert LoadedPlans(plans).find(other) == plans[0]
    differs = replace(plans[0], kernel=replace(plans[0].kernel, layer="third"), configuration=plans[1].configuration)
    assert LoadedPlans([*plans, differs]).find(other) is None
    assert LoadedPlans([*plans, differs]).find(plans[0].kernel) == plans[0]
    assert LoadedPlans(plans).find(replace(other, fresh=True)) is None


def test_a_total_is_divided_as_loaded(tmp_path, monkeypatch):
    handle = opened(total_workspace="100KiB")
    layers = [*KERNELS, ("conv4", PROBLEM)]
    decisions = planned(handle, *layers)
    handle.save_plans(tmp_path / "plans.json")
    monkeypatch.setattr(CpuBackend, "bench", lambda *_: pytest.fail("a loaded plan needs no benchmark"))
    again = opened(total_workspace="100KiB", plans=tmp_path / "plans.json")
    found = planned(again, *layers)
    assert {key: each.configuration for key, each in found.items()} == {
        key: each.configuration for key, each in decisions.items()
    }
    segments = [each.segment for each in found.values()]
    ends = sorted((each.offset_bytes, each.offset_bytes + each.size_bytes) for each in segments)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))
    assert ends[-1][1] <= 100 * 1024


def test_layers_of_one_problem_keep_their_own_plans(tmp_path):
    handle = opened(total_workspace="100KiB")
    planned(handle, ("a", PROBLEM), ("b", PROBLEM))
    handle.save_plans(tmp_path / "plans.json")
    one = json.loads((tmp_path / "plans.json").read_bytes())["plans"][0]
    forced = [[3, "GEMM", 1.0, CpuBackend().algorithm(PROBLEM.part(3), "GEMM").workspace_bytes, []]] * 2
    plain = [[6, "IMPLICIT_GEMM", 1.0, 0, []]]

    def force(content):
        content["plans"] = [{**one, "layer": "a", "parts": forced}, {**one, "layer": "b", "parts": plain}]

    found = planned(
        opened(total_workspace="100KiB", plans=edited(tmp_path / "plans.json", force)), ("a", PROBLEM), ("b", PROBLEM)
    )
    assert [str(each.configuration) for each in found.values()] == ["2x3 GEMM", "1x6 IMPLICIT_GEMM"]


@given(problems(), st.booleans(), st.integers(0, 3))
def test_what_is_written_is_read(problem, fresh, spare):
    handle = opened(workspace_limit=1 << 12, policy="all")
    key = KernelKey("layer", problem, spare << 14, fresh)
    handle.plans.plan(key)
    saved = handle.saved_plans()
    content = encode_plans(saved, handle.backend)
    with (Path(FOLDER) / "plans.json").open("wb") as file:
        file.write(content)
    assert list(read_plans(file.name).plans) == saved


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory):
    global FOLDER  # hypothesis has no fixture for each example
    FOLDER = tmp_path_factory.mktemp("plans")


def change(*path, to):
    """Return an edit that gives a value another one."""

    def edit(content):
        *way, last = path
        for step in way:
            content = content[step]
        content[last] = to

    return edit


DAMAGE = {
    "version": (change("version", to=3), "its version is 3, and this ucudnn reads version 2: make a new file"),
    "format": (change("format", to="ucudnn-profile"), "it is no file of plans"),
    "device": (
        change("conditions", "device", to="NVIDIA H100"),
        "was made for device NVIDIA H100, and backend cpu has",
    ),
    "versions": (change("conditions", "numpy", to="0.9"), "was made for numpy 0.9, and backend cpu has"),
    "cudnn": (change("conditions", "cudnn", to="9.19.0"), "was made for cudnn 9.19.0, and backend cpu has none"),
    "no conditions": (lambda content: content.pop("conditions"), "is damaged (KeyError"),
    "a list": (change("conditions", to=[]), "is damaged (AttributeError"),
    "batch": (change("plans", 0, "batch", to=7), "are not its 7 samples"),
    "batch text": (change("plans", 0, "batch", to="6"), "batch '6' is no whole number from 1"),
    "problem": (change("plans", 0, "problem", "kernel", to=[99, 99]), "is damaged (ProfileError"),
    "unknown field": (change("plans", 0, "problem", "colour", to=1), "is damaged (TypeError"),
    "size": (change("plans", 0, "parts", 0, 0, to=-6), "size -6 is no whole number from 1"),
    "name": (change("plans", 0, "parts", 0, 1, to=None), "None is no name of an algorithm"),
    "time": (change("plans", 0, "parts", 0, 2, to="soon"), "time 'soon' is no number"),
    "infinite": (change("plans", 0, "parts", 0, 2, to=float("inf")), "time inf is no number"),
    "workspace": (change("plans", 0, "parts", 0, 3, to=-1), "-1 is no whole number"),
    "layer": (change("plans", 0, "layer", to=3), "has layer 3"),
    "fresh": (change("plans", 0, "fresh", to=1), "fresh 1"),
    "rows": (change("plans", 0, "parts", 0, 4, to=[[0, 3, "GEMM", 1.0, 0]]), "have 3 rows of 9"),
    "gap": (change("plans", 0, "parts", 0, 4, to=[[0, 3, "GEMM", 1.0, 0], [4, 5, "GEMM", 1.0, 0]]), "leave rows out"),
}


def test_the_name_of_a_file_in_a_deep_folder_is_shown(tmp_path):
    folder = tmp_path / "/".join(["a folder with a long name"] * 12)
    folder.mkdir(parents=True)
    (folder / "plans.json").write_text("[]")
    with pytest.raises(PlanFileError, match=r"^'\.\.\..*long name/plans\.json': it is no file of plans"):
        load_plans(folder / "plans.json", CpuBackend())


@pytest.mark.parametrize(("edit", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_file_that_does_not_fit_is_refused_by_name(saved, edit, message):
    path = edited(saved[0], edit)
    with pytest.raises(PlanFileError) as refused:
        load_plans(path, CpuBackend())
    assert message in str(refused.value)
    assert "plans.json" in str(refused.value)
    assert "make a new file with `--save-plans FILE` or `Handle.save_plans`" in str(refused.value)
    with pytest.raises(PlanFileError):
        opened(plans=path)


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0", b"[" * 100_000, b"\xff\xfe", b"3", b"null", b"[]"])
def test_what_is_no_file_of_plans_is_refused(tmp_path, content):
    path = tmp_path / "plans.json"
    path.write_bytes(content)
    with pytest.raises(PlanFileError, match=r"is no file of plans"):
        read_plans(path)


@pytest.mark.parametrize("name", ["missing.json", ".", "x" * 300])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, name):
    with pytest.raises(PlanFileError, match=r"cannot be read: .*`--save-plans FILE` makes a file"):
        read_plans(tmp_path / name)


def test_any_cut_and_any_flipped_byte_is_refused_or_harmless(saved):
    path, _ = saved
    content = path.read_bytes()
    for at in range(0, len(content), 7):
        for damaged in (content[:at], content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]):
            path.write_bytes(damaged)
            try:
                handle = opened(plans=path)
                found = planned(handle, *KERNELS)
            except PlanFileError:
                continue
            for (_, problem), decision in found.items():
                assert decision.configuration.size == problem.batch
                assert decision.workspace_bytes <= 30_000


@pytest.mark.parametrize(("index", "value"), [(1, "FFTT"), (3, 64), (1, "WINOGRAD_2X2")])
def test_an_algorithm_that_the_backend_has_not_like_this_is_refused_by_name(saved, index, value):
    def edit(content):
        content["plans"][0]["parts"] = [[6, "IMPLICIT_GEMM", 1.0, 0, []]]
        content["plans"][0]["parts"][0][index] = value

    handle = opened(plans=edited(saved[0], edit))
    with pytest.raises(PlanFileError, match=r"the plan of conv0 .*does not fit: backend cpu .*make a new file"):
        planned(handle, KERNELS[0])


def test_handles_of_several_devices_save_to_one_file(tmp_path):
    first, second = opened(), opened()
    planned(first, KERNELS[0])
    planned(second, KERNELS[1])
    save_plans([first, second], tmp_path / "plans.json")
    assert [each.kernel.layer for each in read_plans(tmp_path / "plans.json").plans] == ["conv1", "conv0"]
    with pytest.raises(PlanFileError, match="no plans to save"):
        save_plans([], tmp_path / "plans.json")


def test_plans_of_a_replayed_device_are_saved_with_its_conditions(tmp_path, replay):
    handle = Handle(backend=replay("alexnet"), database="off")
    problem = next(iter(replay("alexnet")._profile.recordings["alexnet"]))
    planned(handle, ("conv1", problem))
    handle.save_plans(tmp_path / "plans.json")
    assert read_plans(tmp_path / "plans.json").conditions["device"] == "NVIDIA H200"
    with pytest.raises(PlanFileError, match="was made for device NVIDIA H200, and backend cpu has"):
        opened(plans=tmp_path / "plans.json")
    again = Handle(backend=replay("alexnet"), plans=tmp_path / "plans.json", database="off")
    assert {each.origin for each in planned(again, ("conv1", problem)).values()} == {Origin.FILE}
