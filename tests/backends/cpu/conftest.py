"""Launches in poisoned and guarded memory, checked against the reference."""

from dataclasses import dataclass
from math import prod, sqrt

import numpy as np
import pytest

from tests.support.reference import WRITTEN, reference_convolution, terms
from ucudnn.backends.base import Offset, Scaling
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.slabs import piece_of

GUARD_BYTES = 256
POISON = 0xFF  # floats of these bytes are NaN


@dataclass
class Tensors:
    """x, w and y of a mini-batch: memory as (outermost, row) with gaps between rows, and shaped views of it."""

    memory: dict
    views: dict

    @classmethod
    def random(cls, whole, rng):
        """Fill tensors and gaps with numbers in [-1, 1)."""
        dtype = whole.dtype.value
        shapes = {"x": whole.x_shape, "w": whole.w_shape, "y": whole.y_shape}
        strides = {"x": whole.x_batch_stride, "w": prod(whole.w_shape[1:]), "y": whole.y_batch_stride}
        memory = {name: rng.uniform(-1, 1, (shapes[name][0], strides[name])).astype(dtype) for name in "xwy"}
        views = {name: memory[name][:, : prod(shapes[name][1:])].reshape(shapes[name]) for name in "xwy"}
        assert all(np.shares_memory(memory[name], views[name]) for name in "xwy")
        return cls(memory, views)

    def operands(self, problem, part, rows):
        """Return x, w and y of the part in float64 with channels first, with 0 instead of NaN."""
        first = {
            name: np.nan_to_num(np.moveaxis(view, -1, 1) if problem.layout.channels_last else view).astype(np.float64)
            for name, view in self.views.items()
        }
        return first["x"][part, :, rows["x"]], first["w"], first["y"][part, :, rows["y"]]


def run_guarded(problem, algorithm, *, total, start, alpha, beta, seed, slab=None):
    """Launch in poisoned memory, check that nothing else is written, and return the relative L2 error.

    With a slab, only its rows are computed. The error is relative to the norm of the result, or to the expected norm of
    as many random terms if the result's terms cancel.
    """
    backend = CpuBackend()
    tensors = Tensors.random(problem.with_batch(total), np.random.default_rng(seed))
    written = WRITTEN[problem.operation]
    part = slice(start, start + problem.batch)
    rows, first_rows = {"x": slice(None), "y": slice(None)}, None
    if slab is not None:
        piece = piece_of(problem, slab)
        problem, first_rows = piece.problem, piece.first_rows
        sizes = zip("xy", first_rows, (problem.spatial[0], problem.output[0]), strict=True)
        rows = {name: slice(first, first + size) for name, first, size in sizes}
    axis = 1 if problem.layout.channels_last else 2
    everywhere = slice(None) if written == "w" else (part, *[slice(None)] * (axis - 1), rows[written])
    output = tensors.views[written][everywhere]
    if beta == 0:
        output[...] = np.nan
    operands = tensors.operands(problem, part, rows)
    held = operands["xwy".index(written)]
    expected = alpha * reference_convolution(problem, *operands) + beta * held
    size = np.abs(alpha) * reference_convolution(problem, *map(np.abs, operands)) / sqrt(terms(problem))
    size += np.abs(beta * held)

    before = {name: memory.copy() for name, memory in tensors.memory.items()}
    call = backend.prepare(problem, algorithm)
    needed = {a.name: a.workspace_bytes for a in backend.algorithms(problem)}[algorithm]
    assert needed == call.workspace_bytes
    arena = backend.allocate(needed + GUARD_BYTES)
    arena.fill(POISON)
    workspace = backend.segment(arena, 0, needed)
    call.launch(*(tensors.views[name] for name in "xwy"), workspace, Offset(start, first_rows), Scaling(alpha, beta))

    assert (arena[needed:] == POISON).all(), f"{algorithm} writes past the {needed} bytes of its workspace"
    result = tensors.operands(problem, part, rows)["xwy".index(written)]
    assert not np.isnan(output).any(), f"{algorithm} leaves or reads poison"
    # Restore the output. Then all memory must be as before, bit for bit.
    shape = tensors.views[written].shape
    output[...] = before[written][:, : prod(shape[1:])].reshape(shape)[everywhere]
    for name, memory in tensors.memory.items():
        assert memory.tobytes() == before[name].tobytes(), f"{algorithm} writes to {name} outside of its samples"
    return np.linalg.norm(result - expected) / max(np.linalg.norm(expected), np.linalg.norm(size), 1e-300)


@pytest.fixture(scope="session")
def guarded():
    """Give tests `run_guarded`."""
    return run_guarded
