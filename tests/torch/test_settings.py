"""Every setting reaches the handles behind PyTorch, from `enable`, `convert`, programs and `ucudnn time --torch`."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ucudnn.torch
from tests.support.every_setting import ALL_OPTIONS, EVERY, FIELDS, arguments, partly, set_variables
from tests.support.noted import noted
from tests.support.operands import QUICK
from ucudnn.handle import Handle
from ucudnn.torch.__main__ import main
from ucudnn.torch.overrides import process_overrides

GIVEN = st.sets(st.sampled_from([field for field in FIELDS if field != "backend"])).map(
    lambda given: given | {"backend"}
)
BY_OPTION_AND_VARIABLE = pytest.mark.parametrize(
    ("options", "variables"),
    [(ALL_OPTIONS, {"workspace_limit_bytes", "cudnn_library"}), ([], FIELDS)],
    ids=["options", "variables"],
)


def convolve():
    """Run one convolution."""
    torch.nn.functional.conv2d(torch.ones(2, 3, 6, 6), torch.ones(4, 3, 3, 3))


def settings_behind(interceptor):
    """Return the settings of an interceptor's only handle, after a convolution."""
    ((device, handle),) = interceptor.handles().items()
    assert device.type == "cpu"
    return handle.settings


@given(GIVEN)
def test_every_setting_reaches_the_handle_of_enable(given):
    with pytest.MonkeyPatch.context() as patch:
        set_variables(patch, {"cudnn_library", "database"} & given)  # the one has no argument
        with ucudnn.torch.enable(**arguments(given - {"cudnn_library"}), effort=QUICK) as on:
            set_variables(patch, set(FIELDS) - given)  # it was read when it was turned on
            convolve()
        assert settings_behind(on._interceptor) == partly(given)


def test_every_setting_reaches_the_handle_of_convert(monkeypatch):
    set_variables(monkeypatch, {"cudnn_library"})
    model = torch.nn.Conv2d(3, 4, 3)
    ucudnn.torch.convert(model, **arguments(set(FIELDS) - {"cudnn_library"}), effort=QUICK)
    model(torch.ones(2, 3, 6, 6))
    assert settings_behind(process_overrides.converted[0]) == EVERY


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return a program of one convolution, and a list that gets the settings of its handle."""
    path, seen = tmp_path / "program.py", []
    path.write_text("import sys; sys.run()")
    monkeypatch.setattr(
        sys, "run", lambda: convolve() or seen.append(settings_behind(process_overrides.interceptor)), raising=False
    )
    return str(path), seen


@BY_OPTION_AND_VARIABLE
def test_every_setting_reaches_the_handle_of_a_program(monkeypatch, program, options, variables):
    set_variables(monkeypatch, variables)
    path, seen = program
    main([*options, path])
    assert seen == [EVERY]


@pytest.fixture
def opened(monkeypatch):
    """Return a list of the settings of handles that are made from now on."""
    return noted(monkeypatch, Handle, "_open", of=lambda handle, settings, *_, **options: settings)


@BY_OPTION_AND_VARIABLE
def test_every_setting_reaches_the_handle_of_a_timed_model(monkeypatch, opened, timed, options, variables):
    set_variables(monkeypatch, variables)
    code, _, errors = timed("tests.support.broken_models:plain", "--shape", "3x6x6", *options)
    assert code == 0, errors
    assert opened == [EVERY]


def test_a_timed_model_obeys_no_slabs(opened, timed):
    code, _, errors = timed("tests.support.broken_models:plain", "--backend", "cpu", "--no-slabs", "--shape", "3x6x6")
    assert code == 0, errors
    assert [settings.slabs for settings in opened] == [False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workspace", "1MiB", "--total-workspace", "9MiB"], "--workspace has no effect with --total-workspace"),
        (["--solver", "highs"], "--solver has no effect without --total-workspace"),
        (["--solver-time-limit", "1"], "--solver-time-limit has no effect without --total-workspace"),
        (["--slabs", "--policy", "undivided"], "--slabs has no effect with policy undivided"),
        (["--total-workspace", "1MiB", "--solver-time-limit", "0"], "--solver-time-limit=0.0 must be more than 0"),
    ],
)
def test_a_program_refuses_an_option_without_effect(program, capsys, options, message):
    path, seen = program
    with pytest.raises(SystemExit) as end:
        main(["--backend", "cpu", *options, path])
    out, errors = capsys.readouterr()
    assert (end.value.code, out, errors.count("\n"), seen) == (2, "", 1, [])
    assert errors.startswith(f"error: {message}")


def test_a_program_takes_a_solver_for_a_total_of_the_environment(monkeypatch, program):
    monkeypatch.setenv("UCUDNN_TOTAL_WORKSPACE_SIZE", "1MiB")
    path, seen = program
    main(["--backend", "cpu", "--solver", "highs", "--slabs", path])
    assert [(each.total_workspace_bytes, each.solver.value, each.slabs) for each in seen] == [(2**20, "highs", True)]
