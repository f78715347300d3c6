"""What tests of several scripts share."""

import sys

import pytest

from bench.tools.results import load


@pytest.fixture
def run_case(monkeypatch, capsys, tmp_path):
    """Return a function that runs a script, which keeps one case.

    The function takes the module of the script and its options. It returns whether the script is satisfied, the name of
    the case, the case itself, and what the script printed.
    """

    def run(script, *options):
        out = tmp_path / "case.json"
        monkeypatch.setattr(sys, "argv", [script.__name__, "--out", str(out), *options])
        met = script.main()
        ((name, case),) = load(out)["cases"].items()
        return met, name, case, capsys.readouterr()

    return run
