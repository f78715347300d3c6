"""An output that shares a byte with an input is refused; one that only interleaves with it is accepted."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucudnn.errors import InvalidProblemError
from ucudnn.execution.overlap import refuse_overlap
from ucudnn.problem import ConvolutionProblem, DataType, Operation


@st.composite
def placed_problems(draw):
    """Draw a small problem with gaps between samples and channels, and three addresses near each other."""
    operation, dtype = draw(st.sampled_from(list(Operation))), draw(st.sampled_from(list(DataType)))
    channels, filters, size = draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)))
    problem = ConvolutionProblem(
        operation=operation,
        batch=draw(st.integers(1, 4)),
        channels=channels,
        spatial=(size, size),
        filters=filters,
        kernel=(1, 1),
        dtype=dtype,
        x_channel_stride=draw(st.sampled_from([0, size * size + 1])),
        alignment=dtype.itemsize,
    )
    problem = replace(problem, x_batch_stride=problem.x_sample + draw(st.integers(0, 12)))
    problem = replace(problem, y_batch_stride=problem.y_sample + draw(st.integers(0, 12)))
    return problem, tuple(draw(st.integers(0, 60)) * dtype.itemsize for _ in range(3))


def bytes_of(problem, name, address):
    """Return the addresses of all bytes of a tensor, one by one."""
    each = problem.dtype.itemsize
    if name == "w":
        return set(range(address, address + problem.w_bytes))
    channels, sizes = (problem.channels, problem.spatial) if name == "x" else (problem.filters, problem.output)
    plane = int(np.prod(sizes))
    batch, channel = getattr(problem, f"{name}_batch_stride"), getattr(problem, f"{name}_channel_stride") or plane
    places = product(range(problem.batch), range(channels), range(plane))
    elements = (n * batch + c * channel + i for n, c, i in places)
    return {address + element * each + byte for element in elements for byte in range(each)}


@given(placed_problems())
def test_refuses_exactly_what_shares_a_byte(placed):
    problem, addresses = placed
    tensors = {name: bytes_of(problem, name, address) for name, address in zip("xwy", addresses, strict=True)}
    written = {"Forward": "y", "BackwardData": "x", "BackwardFilter": "w"}[problem.operation.value]
    shared = [name for name in "xwy" if name != written and tensors[name] & tensors[written]]
    if shared:
        with pytest.raises(InvalidProblemError, match=f"^{written}, which .* shares memory with {shared[0]},"):
            refuse_overlap(problem, *addresses)
    else:
        refuse_overlap(problem, *addresses)


def test_overlaps_that_are_too_hard_to_decide_are_refused(monkeypatch):
    def too_hard(*_, **__):
        raise np.exceptions.TooHardError

    problem = ConvolutionProblem(
        operation=Operation.FORWARD, batch=2, channels=1, spatial=(2, 2), filters=1, kernel=(1, 1), x_batch_stride=8
    )
    problem = replace(problem, y_batch_stride=8)
    refuse_overlap(problem, 0, 1000, 16)
    monkeypatch.setattr(np, "shares_memory", too_hard)
    with pytest.raises(InvalidProblemError, match="y, which Forward writes, shares memory with x"):
        refuse_overlap(problem, 0, 1000, 16)


def test_addresses_of_a_gpu_are_not_read():
    problem = ConvolutionProblem(
        operation=Operation.FORWARD, batch=2, channels=1, spatial=(2, 2), filters=1, kernel=(1, 1)
    )
    far = 0x7F3A_0000_0000
    with pytest.raises(InvalidProblemError, match="shares memory"):
        refuse_overlap(problem, far, far + 4096, far + 16)
    refuse_overlap(problem, far, far + 4096, far + 32)
