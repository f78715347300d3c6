"""bench.memory.translation: cells are LSTM cells, steps are those that PyTorch traces, and batches are the largest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from bench.memory.translation import attention_rows, largest_batch, swapping_of  # noqa: E402
from bench.memory.translation_step import TranslatorSizes, translator_step  # noqa: E402
from bench.memory.translator import CellwiseLstm  # noqa: E402
from ucudnn.memory.devices.profile import load_device  # noqa: E402
from ucudnn.memory.devices.roofline import device_costs  # noqa: E402
from ucudnn.memory.policies.catalog import find_policy  # noqa: E402
from ucudnn.memory.simulation.simulator import simulate  # noqa: E402
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe  # noqa: E402
from ucudnn.memory.torch.record import record  # noqa: E402

pytestmark = pytest.mark.usefixtures("older_objects_frozen")


def test_cellwise_layers_are_those_of_pytorch():
    torch.manual_seed(0)
    width, layers = 6, 2
    mine, theirs = CellwiseLstm(width, layers).double(), torch.nn.LSTM(width, width, layers, batch_first=True).double()
    for layer, gates in enumerate(mine.gates):
        inputs, forgets, outputs, candidate = gates.weight.detach().chunk(4)
        joined = torch.cat([inputs, forgets, candidate, outputs])  # PyTorch's order
        biases = gates.bias.detach().chunk(4)
        with torch.no_grad():
            getattr(theirs, f"weight_ih_l{layer}").copy_(joined[:, :width])
            getattr(theirs, f"weight_hh_l{layer}").copy_(joined[:, width:])
            getattr(theirs, f"bias_ih_l{layer}").copy_(torch.cat([biases[0], biases[1], biases[3], biases[2]]))
            getattr(theirs, f"bias_hh_l{layer}").zero_()
    x = torch.randn(3, 5, width, dtype=torch.float64)
    start = tuple(torch.randn(layers, 3, width, dtype=torch.float64) for _ in range(2))
    for state in (None, start):
        output, (hidden, cells) = mine(x, state)
        expected, (their_hidden, their_cells) = theirs(x, state)
        for found, wanted in ((output, expected), (hidden, their_hidden), (cells, their_cells)):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def taken(graph, batch):
    """Return saved bytes of a sample, peak and time of a step on an M40."""
    sized = graph.with_batch(batch)
    costs = device_costs(load_device("m40"), sized)
    done = simulate(find_policy("stock").plan(sized, costs, None), costs)
    return sum(sized.sizes[storage] for storage in sized.saved) / batch, done.peak_bytes, done.time_ms


@pytest.mark.parametrize(("name", "again"), [("plain", False), ("efficient", True)])
def test_the_step_is_what_pytorch_traces(name, again):
    steps = 3
    recipe = TrainingRecipe(
        model=f"bench.memory.translator:{name}", batch=2, shape=(2, steps), tokens=True, optimizer="none"
    )
    traced, written = record(recipe), translator_step(TranslatorSizes(steps), again=again)
    for batch in (64, 4096):
        theirs, mine = taken(traced, batch), taken(written, batch)
        assert mine[0] == pytest.approx(theirs[0], rel=1e-3)
        assert mine[1] == pytest.approx(theirs[1], rel=0.03)  # a node of autograd holds what it was given
        assert mine[2] == pytest.approx(theirs[2], rel=0.05)


def test_scores_that_are_computed_again_save_a_map_for_each_pair_of_time_steps():
    steps, width = 12, 1024
    kept, again = (translator_step(TranslatorSizes(steps), again=way) for way in (False, True))
    saved = [sum(graph.sizes[storage] for storage in graph.saved) for graph in (kept, again)]
    tanhs, keys_and_queries = 4 * steps * steps * width, 4 * 2 * steps * width
    assert saved[0] - saved[1] == tanhs - keys_and_queries


def test_deeper_and_longer_translators_save_more_by_the_formula():
    for steps, layers, width in ((5, 3, 1024), (7, 4, 64)):
        graph = translator_step(TranslatorSizes(steps, layers, width, words=100), again=False)
        cells = 4 * width * 8 * 2 * steps * layers  # joined 2, gates 3, candidate, state after, and its tanh
        maps = 4 * width * (steps * steps + 5 * steps)  # tanhs; memory, queries, joined context (2) and bounded
        small = 4 * (steps * steps + 512 * steps)  # weights and chances
        # The first states of the encoder are kept, too, and the last ones of the decoder are not.
        assert sum(graph.sizes[each] for each in graph.saved) == cells + maps + small


def test_swapping_lets_a_larger_mini_batch_fit():
    found = swapping_of(translator_step(TranslatorSizes(4), again=False))
    base, capped = found["without swapping"], found["with a cap"]
    assert 0 < base[0] < capped[0]
    assert 0 < base[1] < capped[1]
    assert found["as published"][0] > 0


def test_rows_of_attention_have_both_depths():
    rows = attention_rows(6)
    assert [row.what for row in rows if "largest" in row.what] == [
        f"NMT of 6 time steps, largest mini-batch, score {kind}" for kind in ("kept", "computed again")
    ]
    kept, again = (row.ours for row in rows if "largest" in row.what)
    assert {*kept} == {"3 + 3 layers", "4 + 4 layers"}
    assert all(again[reading] > kept[reading] for reading in kept)
    assert kept["3 + 3 layers"] > kept["4 + 4 layers"]


@given(limit=st.integers(0, 10**6), fixed=st.integers(0, 10**5), slope=st.integers(1, 10**4), bend=st.integers(0, 50))
def test_the_largest_mini_batch_is_found(limit, fixed, slope, bend):
    def peak(batch):
        return fixed + slope * batch + bend * batch * batch

    batch = largest_batch(peak, limit)
    assert batch == 0 or peak(batch) <= limit
    assert peak(batch + 1) > limit
