"""Random tensors on which algorithms are measured."""

from math import prod
from typing import Any

import numpy as np

from ucudnn.backends.cpu.geometry import Array
from ucudnn.problem import ConvolutionProblem

SEED = 20180907
"""Seed of the random operands, which are the same in every run."""


def random_operands(problem: ConvolutionProblem) -> tuple[Array, Array, Array]:
    """Return x, w and y with values in [-0.5, 0.5), in the problem's layout and with its batch strides."""
    random = np.random.default_rng(SEED)
    dtype = np.dtype(problem.dtype.value)
    return (
        _operand(random, problem.x_shape, problem.x_batch_stride, dtype),
        _operand(random, problem.w_shape, prod(problem.w_shape[1:]), dtype),
        _operand(random, problem.y_shape, problem.y_batch_stride, dtype),
    )


def _operand(random: np.random.Generator, shape: tuple[int, ...], stride: int, dtype: np.dtype[Any]) -> Array:
    rows = random.random((shape[0], stride), dtype)
    rows -= 0.5
    return rows[:, : prod(shape[1:])].reshape(shape)
