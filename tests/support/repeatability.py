"""Whether training repeats itself to the bit; where it does not, which tensor and operation differ, and by how much."""

from collections import defaultdict
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
    for (func, one), (_, other) in zip(_results(run), _results(run), strict=True):
        if not all(map(_same, one, other)):
            return str(func)
    return ""


def lacking_operation(run, other):
    """Return the first operator of a function of whose results another function has none, as text; '' if there is none.

    The functions may call operators in another order, more often, and in place or not. What only one of them calls is
    left out, as are operators that return a view or memory as it is. Results may be transposed: their sorted entries
    are compared.
    """
    given = defaultdict(list)
    for func, tensors in _results(other):
        given[_name(func)].append([*map(_sorted, tensors)])
    for number, (func, tensors) in enumerate(_results(run)):
        near = given.get(_name(func), ())
        if near and not func.is_view and not any(all(map(_same, map(_sorted, tensors), each)) for each in near):
            return f"{func}, operator {number}"
    return ""


def differing_tensor(one, other, names):
    """Return which tensor of two runs differs first, the losses before the state, as text; '' if none does.

    Args:
        one: losses and a state.
        other: losses and a state.
        names: the names of the first tensors of the state; those behind them belong to the optimizer.
    """
    for step, (first, second) in enumerate(zip(one[0], other[0], strict=True)):
        if not _same(first, second):
            return f"the loss of step {step}"
    for index, (first, second) in enumerate(zip(one[1], other[1], strict=True)):
        if not _same(first, second):
            return names[index] if index < len(names) else f"tensor {index - len(names)} of the optimizer's state"
    return ""


def _results(run):
    """Return the operators of a function with their results in order."""
    with _Results() as results:
        run()
    return results.kept


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
    return max(distance(*pair) for pair in combinations(runs, 2))


def _name(func):
    """Return the name of an operator, which its form that works in place has, too."""
    return func._schema.name.rstrip("_")


def _sorted(tensor):
    return tensor.nan_to_num(0.125).flatten().sort().values


def _same(one, other):
    return one.shape == other.shape and torch.equal(one.nan_to_num(0.125), other.nan_to_num(0.125))
