"""The process of a cell of `bench.torch.networks`, which prepares itself and waits for its turn. Not a script."""

import json
import os
import re
import select
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from bench.tools.results import ROOT
from bench.torch.network_order import Cell

_FOLDERS = re.compile(r'"/[^"\n]*/(?=[^/"\n]+/[^/"\n]+")')
"""What a traceback says before a file and its folder, which is about the machine."""

_CHUNK = 1 << 16
_MOST_SAID = 1 << 24
_ENDING_S = 30.0
"""Seconds after its answer in which a process has to end."""


class CellProcess:
    """A process that measures a cell when it is told to.

    Args:
        cell: what it measures.
        command: its command line.
        environment: its environment variables.

    Attributes:
        cell: what it measures.
        pid: number of the process.
    """

    def __init__(self, cell: Cell, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.cell = cell
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  a pipe that nobody reads would fill up
        self._popen = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._stdin, self._stdout = self._popen.stdin.fileno(), self._popen.stdout.fileno()
        self.pid = self._popen.pid

    def measure(self, seconds: float) -> dict[str, Any] | None:
        """Let it measure, and return its answer as soon as that is there; the process may still be ending then.

        Returns:
            The answer, with what the process said besides; an error if it ended without one; None if it has neither
            answered nor ended within some seconds.
        """
        with suppress(BrokenPipeError):  # it has ended already
            os.write(self._stdin, b"begin\n")
        try:
            answer = self._answer(monotonic() + seconds)
        except TimeoutError:
            return None
        if answer is None:
            self._wait()
            answer = {"error": f"exit status {self._popen.returncode}"}
        said = os.pread(self._said.fileno(), _MOST_SAID, 0).decode(errors="replace")  # the process may still write
        lines = _FOLDERS.sub('"', said.strip()).splitlines()
        return answer | {"warnings": lines[-12:] if "error" in answer else lines[-8:]}

    def kill(self) -> None:
        """Kill the process, if it has not ended; other threads may use it meanwhile."""
        self._popen.kill()

    def reap(self) -> None:
        """Wait for the end of the process, which has answered or was killed, and close what belongs to it."""
        self._wait()
        for each in (self._popen.stdin, self._popen.stdout, self._said):
            if each is not None:
                each.close()

    def _wait(self) -> None:
        try:
            self._popen.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def _answer(self, end: float) -> dict[str, Any] | None:
        """Return the first line that is an answer; None if the process has closed its output.

        Raises:
            TimeoutError: if there is none in time.
        """
        printed = b""
        while True:
            if not select.select([self._stdout], [], [], max(0.0, end - monotonic()))[0]:
                raise TimeoutError
            chunk = os.read(self._stdout, _CHUNK)
            if not chunk:
                return None
            *lines, printed = (printed + chunk).split(b"\n")
            for line in lines:
                with suppress(ValueError):
                    found = json.loads(line)
                    if isinstance(found, dict):
                        return found
