"""Settings: arguments over environment over defaults, and every field on its way to a handle."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.every_setting import EVERY, FIELDS, TEXTS, arguments, partly, set_variables
from tests.support.problems import make_problem
from ucudnn.errors import SettingsError
from ucudnn.handle import Handle
from ucudnn.policy import BatchSizePolicy
from ucudnn.profiles.measurement import Effort
from ucudnn.settings import VARIABLES, Settings, SolverName, is_set

QUICK = Effort(repeats=1, time_limit_ms=1, warmup=0)


def test_defaults():
    settings = Settings.load({})
    assert settings == Settings()
    assert settings.policy is BatchSizePolicy.POWER_OF_TWO
    assert settings.workspace_limit_bytes == 64 * 2**20
    assert settings.total_workspace_bytes is None


ENVIRONMENT = {variable: TEXTS[field] for field, variable in VARIABLES.items()}


def test_environment_over_defaults_and_arguments_over_both():
    assert Settings.load(ENVIRONMENT) == EVERY
    given = {"policy": "undivided", "workspace_limit_bytes": 5, "solver": SolverName.CBC, "backend": None}
    expected = replace(EVERY, policy=BatchSizePolicy.UNDIVIDED, workspace_limit_bytes=5, solver=SolverName.CBC)
    assert Settings.load(ENVIRONMENT, **given) == expected
    assert Settings.load(dict.fromkeys(ENVIRONMENT, "")) == Settings(), "an empty variable counts as absent"


def test_the_limits_variable_may_be_called_as_its_option():
    settings = Settings.load({"UCUDNN_WORKSPACE_LIMIT": "2MiB"})
    assert settings.workspace_limit_bytes == 2**21
    assert settings.called("workspace_limit_bytes") == "UCUDNN_WORKSPACE_LIMIT"
    both = {"UCUDNN_WORKSPACE_LIMIT": "2MiB", "UCUDNN_DEFAULT_WORKSPACE_LIMIT": "3MiB"}
    assert Settings.load(both).workspace_limit_bytes == 3 * 2**20
    assert is_set("workspace_limit_bytes", {"UCUDNN_WORKSPACE_LIMIT": "2MiB"})


def test_an_unknown_variable_warns_once_with_the_likely_name(monkeypatch):
    monkeypatch.setenv("UCUDNN_WORKSPACE_LIMITS", "1")
    with pytest.warns(UserWarning, match=r"UCUDNN_WORKSPACE_LIMITS is no .*: did you mean UCUDNN_WORKSPACE_LIMIT\?"):
        Settings.load()
    Settings.load()  # a second warning were an error
    monkeypatch.setenv("UCUDNN_XYZZY", "1")
    with pytest.warns(
        UserWarning, match="UCUDNN_XYZZY is no variable of ucudnn, and has no effect: there are UCUDNN_BACK"
    ):
        Settings.load()


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("UCUDNN_BATCH_SIZE_POLICY", "powersOfTwo", "undivided, powerOfTwo, all"),
        ("UCUDNN_DEFAULT_WORKSPACE_LIMIT", "64 apples", "64MiB"),
        ("UCUDNN_TOTAL_WORKSPACE_SIZE", "-5", "64MiB"),
        ("UCUDNN_SOLVER_TIME_LIMIT", "soon", "number of seconds"),
        ("UCUDNN_SOLVER_TIME_LIMIT", "nan", "more than 0 seconds"),
        ("UCUDNN_BENCHMARK_DEVICES", "0,x", "0,1, or all, or ranks"),
        ("UCUDNN_BENCHMARK_DEVICES", "1,1", "differ"),
        ("UCUDNN_DATABASE", " ", "path"),
        ("UCUDNN_BACKEND", "tpu", "auto, cpu, cudnn[:CANDIDATES] or replay:NAME-or-path"),
        ("UCUDNN_BACKEND", "replay:", "auto, cpu, cudnn[:CANDIDATES] or replay:NAME-or-path"),
        ("UCUDNN_SLABS", "few", "give 1 or 0"),
        ("UCUDNN_SOLVER", "xpress", "auto, highs, cbc, glpk, gurobi, cplex"),
    ],
)
def test_a_bad_value_names_the_variable_the_value_and_what_is_allowed(variable, value, allowed):
    with pytest.raises(SettingsError) as caught:
        Settings.load({variable: value})
    message = str(caught.value)
    assert variable in message
    assert repr(value) in message
    assert allowed in message


def test_a_bad_argument_is_named_too():
    with pytest.raises(SettingsError, match="policy='some' is not known"):
        Settings.load({}, policy="some")
    with pytest.raises(SettingsError, match=r"solver_time_limit=\[3\] is no number of seconds"):
        Settings.load({}, solver_time_limit_seconds=[3])
    with pytest.raises(SettingsError, match=r"unknown settings \['limit'\]"):
        Settings.load({}, limit=5)
    for field, value in (("database", 5), ("database", b"x"), ("cudnn_library", 1.0), ("backend", 5)):
        with pytest.raises(SettingsError, match=rf"^{field}={re.escape(repr(value))} is no "):
            Settings.load({}, **{field: value})


def test_a_field_goes_by_the_name_of_its_argument_as_well():
    assert Settings.load({}, workspace_limit="1MiB") == Settings.load({}, workspace_limit_bytes=2**20)
    assert Settings.load({}, solver_time_limit=3) == Settings(solver_time_limit_seconds=3)


GIVEN = st.sets(st.sampled_from([field for field in FIELDS if field != "backend"])).map(
    lambda given: given | {"backend"}
)


@given(GIVEN)
def test_every_field_reaches_a_handle(given):
    expected = partly(given)
    with pytest.MonkeyPatch.context() as patch:
        set_variables(patch, given)
        assert Handle().settings == expected
        set_variables(patch, {"cudnn_library", "database", "strict"} & given)  # two of them have no argument
        assert Handle(**arguments(given - {"cudnn_library", "strict"})).settings == expected


@given(GIVEN)
def test_settings_make_a_handle_whatever_the_environment_says(given):
    expected = partly(given)
    with pytest.MonkeyPatch.context() as patch:
        set_variables(patch, set(FIELDS) - {"backend"})
        handle = Handle.from_settings(expected)
    assert handle.settings == expected
    assert handle.backend.name == "cpu"


def test_settings_of_a_handle_are_obeyed():
    problem = make_problem(batch=8, groups=1)
    plain = Handle.from_settings(Settings(backend="cpu", database="off"), effort=QUICK)
    handle = Handle.from_settings(
        Settings(backend="cpu", database="off", policy=BatchSizePolicy.UNDIVIDED), effort=QUICK
    )
    for each in (plain, handle):
        each.get_algorithm(problem)
        each.optimize()
    assert handle.report().policy == "undivided"
    assert plain.report().policy == "powerOfTwo"
    assert handle.report().kernels[0].configuration.startswith("1x8 ")


def test_a_handle_with_other_settings_measures_as_the_first_one_does():
    heard = []
    settings = Settings(backend="cpu", database="off", policy=BatchSizePolicy.UNDIVIDED)
    first = Handle.from_settings(settings, effort=QUICK, listener=heard.append)
    second = first.with_settings(Settings(backend="cpu", database="off", workspace_limit_bytes=0))
    assert second.backend is first.backend
    assert second.settings.workspace_limit_bytes == 0
    second.get_algorithm(make_problem())
    second.optimize()
    assert heard


def test_paths_and_numbers_of_devices_are_accepted():
    assert Settings.load({}, database=Path("folder") / "file").database == str(Path("folder") / "file")
    for value, devices in (("all", "all"), ("Ranks", "ranks"), (None, None), (0, (0,)), ([0, 1], (0, 1))):
        assert Settings.load({}, benchmark_devices=value).benchmark_devices == devices
    for wrong in ([], 1.5, ["a"], [0, 0], "9" * 5000):
        with pytest.raises(SettingsError, match=r"^benchmark_devices=") as refused:
            Settings.load({}, benchmark_devices=wrong)
        assert len(str(refused.value)) < 300
