"""A layer keeps the name that was made up for it, and neither the names nor their memory grow without bound."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.problems import make_problem
from ucudnn.execution.layer_identity import _MOST_FILTERS, _MOST_LAYERS, LayerIdentities
from ucudnn.problem import DataType, Layout, Operation

SHAPES = [
    {"filters": 2},
    {"kernel": (3, 3)},
    {"groups": 1, "channels": 3},
    {"dtype": DataType.FLOAT64},
    {"layout": Layout.NHWC},
]
FAMILIES = [{"operation": operation} for operation in Operation]
inputs = st.fixed_dictionaries(
    {}, optional={"batch": st.integers(1, 9), "spatial": st.sampled_from([(9, 9), (3, 4)]), "padding": st.just((1, 1))}
)


def held(layers):
    """Return how many entries of each kind are kept."""
    families = layers._families.values()
    places = [problems for family in families for layer in family for problems in layer.filters.values()]
    return len(layers._known), len(families), sum(map(len, families)), len(places), sum(map(len, places))


@given(st.data())
def test_filters_that_stay_keep_their_name_for_all_inputs(data):
    layers = LayerIdentities()
    each_one = [(family, address) for family in range(len(FAMILIES)) for address in range(data.draw(st.integers(1, 4)))]
    first = sorted(data.draw(st.permutations(each_one)), key=lambda one: one[0] > 0)  # Forward first
    later = data.draw(st.lists(st.sampled_from(each_one), max_size=20))
    names = {}
    for family, address in [*first, *later]:
        name = layers.call(make_problem(**FAMILIES[family], **data.draw(inputs)), address)
        assert names.setdefault((family, address), name) == name
    assert len(set(names.values())) == len(each_one)


def test_filters_of_another_shape_belong_to_another_layer():
    layers = LayerIdentities()
    problems = [make_problem(**overrides) for overrides in [*FAMILIES, *SHAPES]]
    for _ in range(3):
        assert [layers.call(problem, 0) for problem in problems] == [f"#{n}" for n in range(1, len(problems) + 1)]


@st.composite
def steps(draw):
    """Draw the calls of a training step, Forward first, and which families' filters stay: any, or none."""
    count = draw(st.integers(1, 5))
    stay = draw(st.sets(st.sampled_from(range(len(FAMILIES)))))
    forward = draw(st.permutations([(0, layer) for layer in range(count)]))
    backward = draw(st.permutations([(family, layer) for family in (1, 2) for layer in range(count)]))
    return [*forward, *backward], stay


@given(steps(), st.lists(inputs, min_size=5, max_size=5), st.integers(2, 3 * _MOST_FILTERS))
def test_filters_that_move_are_known_by_their_place_in_the_round(step, shapes, rounds):
    calls, stay = step
    layers = LayerIdentities()
    names = {}
    for number in range(rounds):
        for family, layer in calls:
            address = (layer, "stays") if family in stay else (layer, number)
            name = layers.call(make_problem(**FAMILIES[family], **shapes[layer]), address)
            assert names.setdefault((family, layer), name) == name
    assert len(set(names.values())) == len(calls)


@given(steps())
def test_memory_does_not_grow_with_rounds(step):
    calls, stay = step
    layers = LayerIdentities()
    sizes = []
    for number in range(3 * _MOST_FILTERS):
        for family, layer in calls:
            layers.call(make_problem(**FAMILIES[family]), (layer, "stays") if family in stay else (layer, number))
        sizes.append(held(layers))
    assert sizes[_MOST_FILTERS:] == [sizes[_MOST_FILTERS]] * 2 * _MOST_FILTERS
    known, _, named, places, problems = sizes[-1]
    assert named == len(calls)
    assert known == places == problems <= _MOST_FILTERS * named


@given(st.lists(st.booleans(), max_size=8), st.integers(0, 5), st.data())
def test_unknown_filters_get_the_registered_layers_in_order(as_registered, count, data):
    layers = LayerIdentities()
    problem = make_problem()
    waiting = {address: layers.register(problem, address) for address in range(count)}
    assert len(set(waiting.values())) == count
    assert waiting == {address: layers.register(problem.with_batch(3), address) for address in waiting}
    names = {}
    for number, known in enumerate(as_registered):
        if known and waiting:
            address = data.draw(st.sampled_from(sorted(waiting)))
            expected = waiting.pop(address)
        else:
            address = number, "not registered"
            expected = waiting.pop(min(waiting)) if waiting else None
        names[address] = layers.call(problem, address)
        assert expected in (None, names[address])
    assert len(set(names.values())) == len(names)
    assert names == {address: layers.call(problem, address) for address in names}


def test_registered_layers_come_before_those_whose_filters_moved():
    layers = LayerIdentities()
    problem = make_problem()
    old = [layers.call(problem, address) for address in range(4)]
    assert layers.call(problem, 0) == old[0]
    registered = [layers.register(problem, (address, "registered")) for address in range(2)]
    assert [layers.call(problem, (address, "moved")) for address in range(5)] == [*registered, *old[1:]]
    assert layers.call(problem, "new") not in [*old, *registered]


def test_a_layer_registered_without_filters_is_the_first_of_its_shape():
    layers = LayerIdentities()
    names = {layers.register(make_problem(batch=batch)) for batch in (2, 4, 8)}
    assert names == {layers.call(make_problem(), "filters")} == {layers.register(make_problem())}
    assert layers.call(make_problem(), "others") not in names


@pytest.mark.parametrize("families", [1, 2])
def test_filters_that_always_change_make_a_bounded_number_of_layers(families, caplog):
    layers = LayerIdentities()
    names = defaultdict(set)
    for address in range(_MOST_LAYERS * (_MOST_FILTERS + 2)):
        for family in FAMILIES[:families]:  # without BackwardFilter, which would tell one step from the next
            names[str(family)].add(layers.call(make_problem(**family), address))
    assert [len(each) for each in names.values()] == [_MOST_LAYERS] * families
    named = families * _MOST_LAYERS
    known = named * _MOST_FILTERS
    assert held(layers) == (known, families, named, known, known)
    assert len(caplog.messages) == 1
    assert "256 layers of one shape" in caplog.text


def test_a_layer_without_room_shares_the_first_of_its_shape():
    layers = LayerIdentities()
    problem, other = make_problem(), make_problem(kernel=(3, 3))
    first = layers.call(problem, "first")
    assert layers.share(problem, "first") is None
    second = layers.call(problem, "second")
    assert layers.share(problem, "second") == first != second
    assert layers.call(problem, "second") == layers.call(problem.with_batch(2), "second") == first
    assert layers.call(other, "second") not in [first, second]
    assert layers.share(other, "second") is None
    assert layers.share(other, "never called") is None
