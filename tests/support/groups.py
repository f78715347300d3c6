"""Random groups of layers, and kernels of layers that may be in them."""

from hypothesis import strategies as st

from tests.support.problems import make_problem
from ucudnn.kernel import Kernel
from ucudnn.problem import Operation

NAMED = ("a", "b", "c", "d")


PROBLEMS = [make_problem(operation=operation, batch=batch) for operation in Operation for batch in (4, 8)]


@st.composite
def groupings(draw, names=(*NAMED, "of no kernel")):
    """Draw up to two groups of up to three branches; () where no layer is in any."""
    places = st.tuples(st.integers(0, 1), st.integers(0, 2))
    placed = draw(st.dictionaries(st.sampled_from(names), places))
    groups = ({branch: [] for _, branch in placed.values()} for _ in range(2))
    found = []
    for group, branches in enumerate(groups):
        for name, place in placed.items():
            if place[0] == group:
                branches[place[1]].append(name)
        found.append(tuple(tuple(branch) for branch in branches.values() if branch))
    return tuple(group for group in found if group)


def places_of(groups):
    return {
        layer: (group, branch)
        for group, branches in enumerate(groups)
        for branch, layers in enumerate(branches)
        for layer in layers
    }


@st.composite
def networks(draw, groups, least=0, most=8):
    """Draw kernels, some of layers that recur; those of no group may stand for two layers."""
    grouped = places_of(groups)
    twice = draw(st.sets(st.sampled_from(["", *NAMED])))
    rows = st.tuples(st.sampled_from(["", *NAMED]), st.sampled_from(PROBLEMS))
    return [
        Kernel(layer=layer, problem=problem, count=2 if layer in twice and layer not in grouped else 1)
        for layer, problem in draw(st.lists(rows, min_size=least, max_size=most))
    ]
