"""A process that writes a report when it exits."""

import os
import subprocess
import sys


def run(program, path, status=0):
    """Return what a process wrote to stderr, which ran a program that reports to a path."""
    environment = {**os.environ, "UCUDNN_REPORT": str(path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    return done.stderr
