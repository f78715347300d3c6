"""Every setting reaches the handles behind PyTorch, from `enable`, `convert`, programs and `ucudnn time --torch`."""

import sys

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import ucudnn.torch  # noqa: E402
from tests.support.every_setting import ALL_OPTIONS, EVERY, FIELDS, arguments, partly, set_variables  # noqa: E402
from ucudnn.cli import app  # noqa: E402
from ucudnn.handle import Handle  # noqa: E402
from ucudnn.profiles.measurement import Effort  # noqa: E402
from ucudnn.torch.__main__ import main  # noqa: E402
from ucudnn.torch.overrides import process_overrides  # noqa: E402

GIVEN = st.sets(st.sampled_from([field for field in FIELDS if field != "backend"])).map(
    lambda given: given | {"backend"}
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


@pytest.mark.parametrize("by", ["option", "variable"])
def test_every_setting_reaches_the_handle_of_a_program(monkeypatch, tmp_path, by):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    set_variables(monkeypatch, FIELDS if by == "variable" else {"workspace_limit_bytes", "cudnn_library"})
    options = [] if by == "variable" else ALL_OPTIONS
    seen = []
    monkeypatch.setattr(sys, "seen", seen, raising=False)
    main([*options, str(program)])
    assert seen == [EVERY]


@pytest.mark.parametrize("by", ["option", "variable"])
def test_every_setting_reaches_the_handle_of_a_timed_model(monkeypatch, capsys, by):
    set_variables(monkeypatch, FIELDS if by == "variable" else {"workspace_limit_bytes", "cudnn_library"})
    options = [] if by == "variable" else ALL_OPTIONS
    opened = spied(monkeypatch)
    quick = ["--repeats", "1", "--time-limit", "1", "--shape", "3x6x6"]
    monkeypatch.setattr(sys, "argv", ["ucudnn", "time", "--torch", f"{__name__}:small", *quick, *options])
    with pytest.raises(SystemExit) as end:
        app.main()
    assert end.value.code == 0, capsys.readouterr().err
    assert opened == [EVERY]


def test_a_timed_model_obeys_no_slabs(monkeypatch, capsys):
    monkeypatch.setenv("UCUDNN_BACKEND", "cpu")
    opened = spied(monkeypatch)
    command = ["ucudnn", "time", "--torch", f"{__name__}:small", "--no-slabs", "--shape", "3x6x6", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        app.main()
    assert end.value.code == 0, capsys.readouterr().err
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
def test_a_program_refuses_an_option_without_effect(tmp_path, capsys, options, message):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with pytest.raises(SystemExit) as end:
        main(["--backend", "cpu", *options, str(program)])
    out, errors = capsys.readouterr()
    assert (end.value.code, out, errors.count("\n")) == (2, "", 1)
    assert errors.startswith(f"error: {message}")


def test_a_program_takes_a_solver_for_a_total_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("UCUDNN_TOTAL_WORKSPACE_SIZE", "1MiB")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    seen = []
    monkeypatch.setattr(sys, "seen", seen, raising=False)
    main(["--backend", "cpu", "--solver", "highs", "--slabs", str(program)])
    assert [(each.total_workspace_bytes, each.solver.value, each.slabs) for each in seen] == [(2**20, "highs", True)]


def small():
    """Return a model of one convolution."""
    return torch.nn.Conv2d(3, 4, 3)


def spied(monkeypatch):
    """Return a list of the settings of handles that are made from now on."""
    opened = []
    make = Handle._open

    def spy(handle, settings, *rest, **options):
        opened.append(settings)
        make(handle, settings, *rest, **options)

    monkeypatch.setattr(Handle, "_open", spy)
    return opened


QUICK = Effort(repeats=1, time_limit_ms=1, warmup=0)
PROGRAM = """
import sys
import torch
from ucudnn.torch.overrides import process_overrides

torch.nn.functional.conv2d(torch.ones(2, 3, 6, 6), torch.ones(4, 3, 3, 3))
sys.seen.extend(handle.settings for handle in process_overrides.interceptor.handles().values())
"""
