"""Tests of the processes of trials."""

import ctypes

import pytest

from ucudnn.memory.torch.comparison.trial_process import process_of, received


def answer(connection):
    get = ctypes.CDLL(None).getenv
    get.argtypes, get.restype = [ctypes.c_char_p], ctypes.c_char_p
    connection.send(get(b"TEARDOWN_CUPTI"))


def test_a_profiler_lets_go_of_cuda_between_the_trials_of_a_process():
    with process_of(answer) as connection:
        assert received(connection) == b"1"
        with pytest.raises(EOFError):
            received(connection)
