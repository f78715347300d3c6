"""Command lines become settings, and options without effect are refused by name."""

from argparse import ArgumentParser

import pytest

from tests.support.every_setting import EVERY, OPTIONS
from ucudnn.command_line import NoEffect, WholeWords, read_settings
from ucudnn.errors import SettingsError
from ucudnn.policy import BatchSizePolicy
from ucudnn.settings import VARIABLES, Settings


def test_options_make_settings(monkeypatch):
    monkeypatch.setenv("UCUDNN_CUDNN_LIBRARY", EVERY.cudnn_library)  # the only setting without an option
    typed = {name: value[0] if value else not name.startswith("--no-") for name, *value in OPTIONS.values()}
    assert read_settings({**typed, "--workspace": "8MiB"}) == EVERY


@pytest.mark.parametrize("option", ["--policy", "--workspace", "--devices", "--database", "--backend", "--solver"])
def test_errors_name_the_option_that_was_typed(option):
    with pytest.raises(SettingsError, match=rf"^{option}[=:]"):
        read_settings({option: " " if option == "--database" else "some apples"})


def test_a_setting_is_called_as_the_user_gave_it(monkeypatch):
    monkeypatch.setenv("UCUDNN_BENCHMARK_DEVICES", "0")
    assert read_settings({}).called("benchmark_devices") == "UCUDNN_BENCHMARK_DEVICES"
    assert read_settings({"--devices": "0"}).called("benchmark_devices") == "--devices"
    assert Settings.load({}, benchmark_devices=0).called("benchmark_devices") == "benchmark_devices"
    assert Settings().called("total_workspace_bytes") == "total_workspace"


def test_options_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("UCUDNN_SLABS", "0")
    monkeypatch.setenv("UCUDNN_BATCH_SIZE_POLICY", "all")
    settings = read_settings({"--slabs": True})
    assert (settings.slabs, settings.policy) == (True, BatchSizePolicy.ALL)


def test_a_profile_is_a_backend_other_options_are_no_settings_and_fields_replace_options():
    assert read_settings({"--profile": "mine.json"}).backend == "replay:mine.json"
    assert read_settings({"--json": True, "NETWORK": "alexnet", "--database": "off"}) == Settings(database="off")
    settings = read_settings({"--policy": ["all", "undivided"], "--workspace": "1MiB"}, policy="adaptive")
    assert (settings.policy, settings.workspace_limit_bytes) == (BatchSizePolicy.ADAPTIVE, 2**20)


BESIDE = NoEffect(options=("--a", "--b"), beside=("--torch", "backend cpu"))
WITHOUT = NoEffect(options=("--solver",), without=("--total-workspace",))
BOTH = NoEffect(options=("--math",), beside=("--dtype float16",), without=("--dtype float32",))


@pytest.mark.parametrize(
    ("rule", "typed", "message"),
    [
        (BESIDE, {"--a": 1, "--torch": True}, "--a has no effect with --torch: leave it out"),
        (BESIDE, {"--b": 1, "--a": 1, "--torch": True}, "--b, --a have no effect with --torch: leave them out"),
        (BESIDE, {"--a": 1, "--backend": "cpu"}, "--a has no effect with backend cpu: leave it out"),
        (WITHOUT, {"--solver": "glpk"}, "--solver has no effect without --total-workspace: add that, or leave it out"),
        (BOTH, {"--math": "fma", "--dtype": "Float16"}, "--math has no effect with --dtype Float16: leave it out"),
        (BOTH, {"--math": ["fma"], "--dtype": ["float16"]}, "--math has no effect with --dtype float16: leave it out"),
    ],
)
def test_an_option_without_effect_is_refused(rule, typed, message):
    with pytest.raises(SettingsError) as caught:
        read_settings(typed, [rule])
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("rule", "typed"),
    [
        (BESIDE, {"--a": 1}),
        (BESIDE, {"--torch": True, "--c": 1}),
        (WITHOUT, {"--solver": "glpk", "--total-workspace": "1MiB"}),
        (BOTH, {"--math": "fma"}),
        (BOTH, {"--math": ["fma"], "--dtype": ["float16", "float32"]}),
    ],
)
def test_an_option_with_an_effect_is_taken(rule, typed):
    assert isinstance(read_settings(typed, [rule]), Settings)


@pytest.mark.parametrize(
    ("variable", "value", "case", "words"),
    [
        (VARIABLES["total_workspace_bytes"], "1MiB", "--total-workspace", "UCUDNN_TOTAL_WORKSPACE_SIZE"),
        (VARIABLES["backend"], "cpu", "backend cpu", "backend cpu"),
        (VARIABLES["backend"], "replay:h200", "backend replay", "backend replay:h200"),
        (VARIABLES["backend"], "cudnn:legacy", "backend cudnn:", "backend cudnn:legacy"),
        (VARIABLES["policy"], "undivided", "policy undivided", "policy undivided"),
    ],
)
def test_the_environment_makes_cases_too(monkeypatch, variable, value, case, words):
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=f"^--a has no effect with {words}: leave it out$"):
        read_settings({"--a": 1}, [NoEffect(options=("--a",), beside=(case,))])
    monkeypatch.setenv(variable, "cudnn" if variable == VARIABLES["backend"] else "")  # alone, it leaves the candidates
    read_settings({"--a": 1}, [NoEffect(options=("--a",), beside=(case,))])


def test_help_of_argparse_breaks_no_word_and_keeps_indented_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    parser = ArgumentParser(
        description="A paragraph that is\nwider than the terminal, well-known as --total-workspace.\n\nAnother one.",
        epilog="examples:\n    one line that is wider than the terminal has columns\n",
        formatter_class=WholeWords,
    )
    parser.add_argument("--plan", help="a plan that is read by vdnn-ext-all-p [UCUDNN_DEFAULT_WORKSPACE_LIMIT]")
    lines = parser.format_help().splitlines()
    assert "A paragraph that is wider than the" in lines
    assert "terminal, well-known as" in lines
    assert "    one line that is wider than the terminal has columns" in lines
    words = " ".join(lines).split()
    assert {"--total-workspace.", "vdnn-ext-all-p", "[UCUDNN_DEFAULT_WORKSPACE_LIMIT]"} <= {*words}
