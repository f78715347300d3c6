"""The handle of C++ refuses calls that would give wrong numbers, as the one of Python does."""

import subprocess

import numpy as np
import pytest

from tests.support.paths import NATIVE
from ucudnn.native import build


@pytest.fixture(scope="module")
def refused(computes):
    """Return a function that runs the program, and returns the lines that it says on stderr."""
    return lambda what: computes("refusals", what, UCUDNN_DEFAULT_WORKSPACE_LIMIT="300B").splitlines()


@pytest.mark.parametrize("what", ["while it computes", "while it plans", "another handle", "another thread"])
def test_a_call_during_a_call_is_refused(refused, what):
    (said,) = refused(what)
    by_thread = "a handle was used by two threads at the same time"
    by_call = "a convolution was called inside another one of the same thread"
    assert said.startswith(f"ucudnn: {by_thread if what == 'another thread' else by_call}")


def test_an_output_that_shares_memory_with_an_input_is_refused(refused):
    assert refused("overlap") == [
        f"ucudnn: {out}, which {operation} writes, shares memory with {one}, which it reads:"
        f" give {out} memory of its own"
        for out, operation, one in (
            ("y", "Forward", "x"),
            ("x", "BackwardData", "y"),
            ("x", "BackwardData", "w"),
            ("w", "BackwardFilter", "x"),
            ("w", "BackwardFilter", "y"),
        )
    ]


def drawn(rng):
    """Return the first byte, the sizes and the strides of a random tensor; the longest stride is first."""
    sizes, strides, step = [], [], int(rng.integers(1, 4))
    for _ in range(rng.integers(1, 5)):
        sizes.append(int(rng.integers(1, 5)))
        strides.append(step)
        step = max(1, int(step * sizes[-1] * rng.choice([1, 1, 1, 2, 3])) + int(rng.choice([0, 0, 0, 1, -1, 5])))
    order = np.argsort(strides, kind="stable")[::-1]
    return int(rng.integers(0, 200)), [sizes[i] for i in order], [strides[i] for i in order]


def test_overlap_is_what_numpy_finds(toolchain, tmp_path):
    program = toolchain.compile(
        NATIVE / "overlaps.cpp", tmp_path / "overlaps", f"-I{build.SOURCES}", str(build.SOURCES / "overlap.cpp")
    )
    rng = np.random.default_rng(3)
    memory = np.zeros(100_000, np.uint8)
    lines, expected = [], []
    for _ in range(2000):
        one, other = drawn(rng), drawn(rng)
        if rng.random() < 0.5:  # two ranges of one array
            other = other[0], one[1], one[2]
        views = [np.lib.stride_tricks.as_strided(memory[b:], shape, step) for b, shape, step in (one, other)]
        expected.append(int(np.shares_memory(*views)))
        lines += [" ".join(map(str, [len(shape), begin, *shape, *step])) for begin, shape, step in (one, other)]
    done = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True, check=True)
    assert 0.1 < np.mean(expected) < 0.9
    assert [int(line) for line in done.stdout.split()] == expected
