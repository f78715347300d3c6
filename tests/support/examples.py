"""The programs in `examples/`: where they lie, and what the handbook shows that they print."""

import re
import subprocess
import sys

from tests.support.documents import HANDBOOK
from tests.support.paths import ROOT

EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}


def shown(name):
    """Return what the handbook's page of examples shows that a program prints; '' if it shows nothing."""
    found = re.search(rf"examples/{name}\.py\n```\n\n```text\n(.*?)```", HANDBOOK["examples"], re.DOTALL)
    return found[1] if found else ""


def run_example(name, *, check=True):
    return subprocess.run([sys.executable, EXAMPLES[name]], capture_output=True, text=True, check=check)
