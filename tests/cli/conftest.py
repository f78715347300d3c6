"""The command line in the process of the tests, which spares each call a Python of its own."""

import sys

import pytest

from ucudnn.cli.app import main


@pytest.fixture
def call(monkeypatch, capsys):
    """Return a function that runs `ucudnn`, and returns exit status, standard output and standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["ucudnn", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run
