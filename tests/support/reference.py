"""An independent reference of the three operations, tap by tap, on NumPy's arrays or CuPy's."""

from itertools import product
from math import prod

import numpy as np

from ucudnn.problem import Operation

WRITTEN = {Operation.FORWARD: "y", Operation.BACKWARD_DATA: "x", Operation.BACKWARD_FILTER: "w"}


def reference_convolution(problem, x, w, y):
    """Compute in float64, tap by tap, on channels-first arrays: x (N, C, *S), w (K, C / groups, *R), y (N, K, *O)."""
    operation = problem.operation
    pads = [(0, 0), (0, 0), *problem.paddings]
    padded = np.pad(np.zeros_like(x) if operation is Operation.BACKWARD_DATA else x, pads)
    filtered, gradient = np.zeros_like(y), np.zeros_like(w)
    channels, filters = problem.channels // problem.groups, problem.filters // problem.groups
    for group, tap in product(range(problem.groups), product(*map(range, problem.kernel))):
        cs = slice(group * channels, (group + 1) * channels)
        ks = slice(group * filters, (group + 1) * filters)
        sides = zip(tap, problem.dilation, problem.output, problem.stride, strict=True)
        at = tuple(slice(t * d, t * d + (o - 1) * s + 1, s) for t, d, o, s in sides)
        window, factors = padded[:, cs, *at], w[ks, :, *tap]
        if operation is Operation.FORWARD:
            filtered[:, ks] += np.einsum("nc...,kc->nk...", window, factors)
        elif operation is Operation.BACKWARD_DATA:
            window += np.einsum("nk...,kc->nc...", y[:, ks], factors)
        else:
            window, part = (a.reshape(*a.shape[:2], -1) for a in (window, y[:, ks]))
            gradient[ks, :, *tap] += np.einsum("ncp,nkp->kc", window, part)
    inside = tuple(slice(pad, pad + size) for (pad, _), size in zip(problem.paddings, problem.spatial, strict=True))
    return {"y": filtered, "w": gradient, "x": padded[:, :, *inside]}[WRITTEN[operation]]


def scaled_reference(problem, x, w, y, alpha=1.0, beta=0.0):
    """Return alpha * conv + beta * out in float64, in the problem's layout; at beta = 0 the output is not read."""
    last = problem.layout.channels_last
    wide = [np.asarray(each, np.float64) for each in (x, w, y)]
    found = reference_convolution(problem, *(np.moveaxis(each, -1, 1) if last else each for each in wide))
    out = wide["xwy".index(WRITTEN[problem.operation])]
    return alpha * (np.moveaxis(found, 1, -1) if last else found) + (beta * out if beta else 0)


def terms(problem):
    """Products that add up to one element of the output, about."""
    kernel = prod(problem.kernel)
    return {
        Operation.FORWARD: kernel * problem.channels // problem.groups,
        Operation.BACKWARD_DATA: kernel * problem.filters // problem.groups,
        Operation.BACKWARD_FILTER: problem.batch * prod(problem.output),
    }[problem.operation]
