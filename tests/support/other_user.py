"""Another user: what root may do to test that files of others are told apart."""

import os
import pickle
import warnings

import pytest

OTHER = 54321
"""The number of a user that no system has."""

needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files to another user"
)


def run_as_other(run):
    """Return what a function returns, or the exception that it raises, in a child process of another user."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of forks beside threads
        child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            found = run()
        except BaseException as error:  # noqa: BLE001 (which the test looks at)
            found = error
        os.write(writer, pickle.dumps(found))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        found = pickle.load(file)
    os.waitpid(child, 0)
    return found
