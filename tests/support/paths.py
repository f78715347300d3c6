"""Where things lie in the repository."""

import fcntl
import os
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "tests" / "native"
"""Sources of the stand-ins for cuDNN and CuPy, and of the C++ programs that are tested."""


def shared_folder(tmp_path_factory, name):
    """Return a folder that all processes of a run share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def alone_in(folder):
    """Let one process at a time work in a folder, so that the first one makes what all need."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
