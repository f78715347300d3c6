"""Packed calls on host memory: the same results as on the slab itself, and no other memory is written."""

import ctypes

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.address_backend import HostCall, assert_equals_plain_call
from tests.support.operands import operands
from tests.support.problems import divided
from ucudnn.backends.base import Offset, Scaling
from ucudnn.backends.cudnn.algorithms.packed import PACKING, PackedCall, dense, has_gaps
from ucudnn.profiles.measurement import Algorithm
from ucudnn.slabs import piece_of, slabs_of


def copy(to, to_step, source, source_step, run_bytes, count):
    for index in range(count):
        ctypes.memmove(to + index * to_step, source + index * source_step, run_bytes)


@given(divided(), st.sampled_from([0.0, 1.0, -0.5]), st.data())
def test_equals_the_call_on_the_slab_itself(case, beta, data):
    problem, rows = case
    piece = piece_of(problem, data.draw(st.sampled_from(slabs_of(problem, rows))))
    part = piece.problem
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    options = {"offset": Offset(0, piece.first_rows), "scaling": Scaling(0.75, beta)}
    call = PackedCall(part, HostCall(dense(part)), 0, copy)
    assert_equals_plain_call(call, part, operands(problem, rng), **options)


@given(divided())
def test_copies_have_no_gaps_and_are_part_of_the_workspace(case):
    problem, rows = case
    part = piece_of(problem, slabs_of(problem, rows)[0]).problem
    copies = dense(part)
    assert not has_gaps(copies)
    assert has_gaps(part) is not (problem.layout.channels_last or part.x_channel_stride == part.y_channel_stride == 0)
    assert (copies.spatial, copies.output, copies.paddings) == (part.spatial, part.output, part.paddings)
    inner = Algorithm(name="eng1_k2=3", workspace_bytes=512, api="graph", notes=("TENSOR_CORE",))
    packed = PACKING.algorithm(part, inner)
    assert packed.workspace_bytes >= 512 + copies.x_bytes + copies.y_bytes
    assert packed.workspace_bytes % 256 == 0
    assert packed.workspace_bytes == PackedCall(part, None, 512, copy).workspace_bytes
    assert packed.name == "eng1_k2=3+packed"
    assert PACKING.asked(part, packed.name) == (copies, inner.name)
