"""Random tensors on which algorithms are measured."""

from math import prod
from typing import Any

import numpy as np

from ucudnn.arrays import BiasedFilters
from ucudnn.backends.cpu.geometry import Array
from ucudnn.problem import ConvolutionProblem

SEED = 20180907
"""Seed of the random operands, which are the same in every run."""


def random_operands(problem: ConvolutionProblem) -> tuple[Array, Array | BiasedFilters, Array]:
    """Return x, w and y with values in [-0.5, 0.5), in the problem's layout and with its batch strides."""
    random = np.random.default_rng(SEED)
    dtype = np.dtype(problem.dtype.value)
    x = _operand(random, problem.x_shape, problem.x_batch_stride, dtype)
    w = _operand(random, problem.w_shape, prod(problem.w_shape[1:]), np.dtype(problem.w_dtype.value))
    y = _operand(random, problem.y_shape, problem.y_batch_stride, dtype)
    bias = _operand(random, (1, problem.filters), problem.filters, dtype)[0] if problem.biased else None
    return x, w if bias is None else BiasedFilters(w, bias), y


def _operand(random: np.random.Generator, shape: tuple[int, ...], stride: int, dtype: np.dtype[Any]) -> Array:
    drawn = dtype if dtype.itemsize > 2 else np.dtype(np.float32)  # no generator draws 16 bits
    rows = random.random((shape[0], stride), drawn)
    rows -= 0.5
    return rows.astype(dtype, copy=False)[:, : prod(shape[1:])].reshape(shape)
