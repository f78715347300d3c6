"""Trains under one setting in a process of its own, without a database. Not a script."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from bench.tools.results import ROOT
from ucudnn.settings import VARIABLES


def trained(module: str, arguments: Namespace, setting: str, names: Iterable[str]) -> dict[str, Any]:
    """Run a script with --train in a process of its own, and return the JSON of its last line.

    Args:
        module: the script.
        arguments: the command line of this process.
        setting: under which it trains.
        names: of the arguments that it is given as they are.

    Raises:
        SystemExit: if it fails; the message ends with what it said.
    """
    command = [sys.executable, "-m", module, "--train", "--setting", setting]
    for name in names:
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    environment = {**os.environ, VARIABLES["database"]: "off"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{setting}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
