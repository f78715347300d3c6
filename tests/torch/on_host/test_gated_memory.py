"""Programs within a limit of live bytes and workspace together, whose plans the gate computes where there is room."""

import ctypes
import subprocess
from types import SimpleNamespace

import pytest
import torch

from tests.support.gate_call import directs
from tests.support.paths import NATIVE
from tests.support.tuned_program import python_calls, taken
from ucudnn.torch.gate.gate_library import _flags, _links
from ucudnn.torch.overrides import process_overrides

KIB, MIB = 1 << 10, 1 << 20
MEMORY = 8 * MIB
"""A limit of memory, of which 1 MiB stays free because blocks of PyTorch's allocator may be so much larger."""


@pytest.fixture(scope="session")
def counting(tmp_path_factory):
    """Return an allocator of CPU tensors that says how many bytes live, as that of a GPU does."""
    path = tmp_path_factory.mktemp("counting") / "counting_allocator.so"
    flags = [each for each in _flags() if each != "-fvisibility=hidden"]
    command = ["c++", *flags, str(NATIVE / "counting_allocator.cpp"), "-o", str(path), *_links()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(path))
    for each in (library.count_live, library.count_peak, library.count_after):
        each.restype = ctypes.c_int64
    library.count_after.argtypes = [ctypes.c_int64]
    return SimpleNamespace(
        begin=library.count_begin,
        end=library.count_end,
        live=library.count_live,
        peak=library.count_peak,
        after=library.count_after,
    )


@pytest.fixture
def counted(gate_library, counting):
    """Count the bytes of CPU tensors in a test."""
    counting.begin()
    yield counting
    counting.end()


@pytest.fixture
def bounded(program, gate_library, counted):
    """Return a function that makes a program within a limit of memory."""
    return lambda limit_bytes=MIB: program(
        limit_bytes=limit_bytes, memory_bytes=MEMORY, live=counted.live, library=gate_library
    )


@pytest.fixture
def in_python(monkeypatch):
    """Return a list that gets an item for each call that comes to Python, once operators are registered again."""
    return python_calls(monkeypatch)


def settle(one, in_python):
    """Take steps until nothing is tried, and no call comes to Python."""
    one.until(lambda: one.is_final)
    process_overrides.refresh()
    in_python.clear()
    one.until(lambda: not taken(in_python))


def test_calls_within_a_limit_of_memory_do_not_come_to_python_while_there_is_room(bounded, counted, in_python, calls):
    one = bounded()
    with one.enable():
        settle(one, in_python)
        calls()
        before = sum(kernel.calls[0] for kernel in directs())
        counted.peak()
        for _ in range(3):
            one.check()
        assert counted.peak() <= MEMORY - MIB
        assert not in_python
        assert len(directs()) == 5
        assert sum(kernel.calls[0] for kernel in directs()) == before + 15
        assert len(calls()) >= 15
        assert {kernel.most_bytes for kernel in directs()} == {MEMORY - MIB}
        assert max(kernel.workspace_bytes for kernel in directs()) > KIB
        assert one.program.baseline_calls == 0


def test_no_workspace_is_taken_where_live_bytes_leave_no_room_for_it(bounded, counted, in_python):
    rooms = (256 * KIB, 64 * KIB, 48 * KIB, 40 * KIB, 36 * KIB, 32 * KIB, 28 * KIB, 24 * KIB, 0)
    python, gated, lived = ({limit: [] for limit in (0, MIB)} for _ in range(3))
    for limit_bytes in python:
        one = bounded(limit_bytes)
        with one.enable():
            settle(one, in_python)
            for room in rooms:
                one.check()
                ballast = torch.empty(MEMORY - MIB - counted.live() - room, dtype=torch.uint8)
                in_python.clear()
                counted.peak()
                before = {id(kernel): kernel.calls[0] for kernel in directs()}
                one.check()
                ran = [kernel for kernel in directs() if kernel.calls[0] > before.get(id(kernel), 0)]
                sizes = {kernel.workspace_bytes for kernel in ran} - {
                    0,
                    *(each.nbytes for each in one.model.parameters()),
                }
                lived[limit_bytes] += [after for size in sizes if (after := counted.after(size))]
                python[limit_bytes].append(len(in_python))
                gated[limit_bytes].append(sum(kernel.calls[0] for kernel in directs()) - sum(before.values()))
                del ballast
            assert one.program.baseline_calls == 0
    assert not any(python[0]), "without a workspace, live bytes do not matter"
    assert len(lived[MIB]) > len(rooms)
    assert max(lived[MIB]) <= MEMORY - MIB, "live bytes and a workspace that has just been allocated"
    assert (python[MIB][0], gated[MIB][0]) == (0, 5)
    assert python[MIB][-1] > 0, "which makes plans that need less"
    assert any(0 < count < 5 for count in gated[MIB]), "some calls have room in the same step"


def test_where_the_allocator_says_no_live_bytes_all_calls_come_to_python(bounded, counted, in_python, caplog):
    one = bounded()
    with one.enable():
        counted.end()
        try:
            one.until(lambda: "does not say how many bytes live" in caplog.text)
            assert not one.is_gated
            in_python.clear()
            one.check()
            assert len(in_python) == 4
        finally:
            counted.begin()


def test_plans_that_were_replaced_because_memory_is_short_are_computed_by_the_gate_again(bounded, counted, in_python):
    one = bounded()
    with one.enable():
        settle(one, in_python)
        before = max(kernel.workspace_bytes for kernel in directs())
        ballast = torch.empty(MEMORY - MIB - counted.live(), dtype=torch.uint8)
        in_python.clear()
        one.check()
        assert in_python, "there is no room for a workspace"
        one.until(lambda: not taken(in_python), 100)
        assert len(directs()) >= 5, (
            "a gradient whose workspace had no room beside the other one has a signature of its own"
        )
        assert max(kernel.workspace_bytes for kernel in directs()) < before
        counts = {
            id(kernel.calls): kernel.calls for kernel in directs()
        }.values()  # of a kernel that two signatures share, once
        count = sum(each[0] for each in counts)
        one.check()
        assert not in_python
        assert sum(each[0] for each in counts) == count + 5
        assert one.program.baseline_calls == 0
        del ballast
