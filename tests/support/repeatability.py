"""Whether plain training repeats itself to the bit; where it does not, which operation differs, and by how much."""

from itertools import combinations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Results(TorchDispatchMode):
    """Keeps what each operator returned, on the host."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim" and "empty" not in func._opname:
            tensors = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
            self.kept.append((func, [each.detach().to("cpu", copy=True) for each in tensors]))
        return result


def differing_operation(run):
    """Return the first operator whose results differ between two calls of a function, as text; '' where none does.

    Operators that return memory as it is are left out.
    """
    found = []
    for _ in range(2):
        with _Results() as results:
            run()
        found.append(results.kept)
    for (func, one), (_, other) in zip(*found, strict=True):
        if not all(map(_same, one, other)):
            return str(func)
    return ""


def same(one, other):
    """Return whether two runs, each losses and a state, are equal to the bit."""
    pairs = zip([*one[0], *one[1]], [*other[0], *other[1]], strict=True)
    return all(_same(*pair) for pair in pairs)


def distance(one, other):
    """Return the largest difference between two runs, as a share of the largest entry of its tensor."""
    found = 0.0
    for first, second in zip([*one[0], *one[1]], [*other[0], *other[1]], strict=True):
        if first.numel():
            first, second = first.double(), second.double()
            scale = float(first.abs().max())
            found = max(found, float((first - second).abs().max()) / (scale or 1.0))
    return found


def largest_distance(runs):
    """Return the distance of those two runs that differ most."""
    return max(distance(*pair) for pair in combinations(runs, 2))


def _same(one, other):
    return one.shape == other.shape and torch.equal(one.nan_to_num(0.125), other.nan_to_num(0.125))
