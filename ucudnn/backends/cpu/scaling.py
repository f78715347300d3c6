"""Exact scaling, out = alpha * result + beta * out, without temporaries. At beta = 0 `out` is not read."""

import numpy as np

from ucudnn.backends.cpu.geometry import Array


def prescale(out: Array, beta: float) -> None:
    """Write out = beta * out; at beta = 0 write zeros, even over NaN."""
    if beta == 0:
        out.fill(0)
    elif beta != 1:
        np.multiply(out, beta, out=out)


def accumulate(out: Array, term: Array) -> None:
    """Write out = out + term."""
    np.add(out, term, out=out)


def finish(out: Array, result: Array, alpha: float, beta: float) -> None:
    """Write out = alpha * result + beta * out.

    Args:
        out: the output; not read at beta = 0.
        result: array of the same shape that shares no memory with `out`; overwritten with arbitrary values.
        alpha: factor of `result`.
        beta: factor of the values that `out` holds.
    """
    if beta == 0:
        np.multiply(result, alpha, out=out)
        return
    if alpha != 1:
        np.multiply(result, alpha, out=result)
    prescale(out, beta)
    accumulate(out, result)
