"""Ctrl-C: it waits for the end of others' imports, and workers do not see it."""

import os
import signal

import pytest

from ucudnn.benchmarking.parallel.interrupts import interrupts_later


@pytest.fixture
def python_interrupts():
    """Python's own handler, which is missing where a shell started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_interrupts")
@pytest.mark.parametrize("error", [None, ImportError])
def test_an_interrupt_waits_for_the_end(error):
    done = []

    def body():
        with interrupts_later():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(True)
            if error is not None:
                raise error

    with pytest.raises(KeyboardInterrupt):
        body()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_one_nothing_happens():
    with interrupts_later():
        pass
    with pytest.raises(ImportError), interrupts_later():
        raise ImportError


def test_who_ignores_it_still_does():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_later():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
