"""Tests of additive attention that recomputes its score: bits, gradients, saved bytes and the peak."""

import re

import pytest

torch = pytest.importorskip("torch")

from bench.memory.attention_layers import StepByStepAttention  # noqa: E402
from tests.support.training_steps import step_of  # noqa: E402
from ucudnn.errors import InvalidValueError  # noqa: E402
from ucudnn.memory.attention import AdditiveAttention  # noqa: E402
from ucudnn.memory.torch.measuring.measured_peak import peak_bytes  # noqa: E402

BATCH, STEPS, POSITIONS, QUERY, MEMORY, HIDDEN = 3, 5, 7, 6, 10, 8


def both():
    """Return the step-by-step layer and ours, with the same parameters."""
    plain, ours = StepByStepAttention(QUERY, MEMORY, HIDDEN), AdditiveAttention(QUERY, MEMORY, HIDDEN)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def operands(steps=STEPS, dtype=torch.float32):
    query = torch.randn(BATCH, steps, QUERY, dtype=dtype, requires_grad=True)
    return query, torch.randn(BATCH, POSITIONS, MEMORY, dtype=dtype, requires_grad=True)


def padded():
    padding = torch.zeros(BATCH, POSITIONS, dtype=torch.bool)
    padding[0, 4:] = padding[2, :1] = True
    return padding


def outcome(layer, call, query, memory):
    """Return outputs and all gradients of a call, whose outputs are weighted at random."""
    inputs = [query.detach().requires_grad_(), memory.detach().requires_grad_()]
    context, weights = call(layer, *inputs)
    torch.manual_seed(1)
    loss = (context * torch.randn_like(context)).sum() + (weights * torch.randn_like(weights)).sum()
    loss.backward()
    return [context, weights, *(each.grad for each in (*inputs, *layer.parameters()))]


def at_once(layer, query, memory):
    return layer(query, memory)


def with_padding(layer, query, memory):
    return layer(query, memory, padding=padded())


def in_turn(layer, query, memory):
    """Call the layer as a decoder whose query depends on the context of the step before."""
    keys = layer.keys(memory)
    contexts, weights = [], []
    carried = torch.zeros(BATCH, 1, QUERY)
    for step in range(query.shape[1]):
        context, weight = layer(query[:, step : step + 1] + carried, memory, keys=keys, padding=padded())
        carried = context[..., :QUERY]
        contexts.append(context)
        weights.append(weight)
    return torch.cat(contexts, 1), torch.cat(weights, 1)


def autocast(layer, query, memory):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(query, memory)


def transposed(layer, query, memory):
    """Operands whose time comes first in memory, as recurrent layers give them."""
    return layer(
        query.transpose(0, 1).contiguous().transpose(0, 1), memory.transpose(0, 1).contiguous().transpose(0, 1)
    )


@pytest.mark.parametrize("call", [at_once, with_padding, in_turn, autocast, transposed])
def test_outputs_and_gradients_are_those_of_the_step_by_step_layer_to_the_bit(call):
    plain, ours = both()
    query, memory = operands()
    expected, found = (outcome(layer, call, query, memory) for layer in (plain, ours))
    assert len(expected) == 2 + 2 + 4
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.abs().max() > 0


def test_gradients_are_right_in_float64():
    layer = AdditiveAttention(QUERY, MEMORY, HIDDEN, dtype=torch.float64)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def called(query, memory, *given):
        return torch.func.functional_call(layer, dict(zip(names, given, strict=True)), (query, memory))

    assert torch.autograd.gradcheck(called, (*operands(dtype=torch.float64), *parameters))


def test_outputs_are_softmax_and_weighted_sum_of_the_published_score():
    layer = AdditiveAttention(QUERY, MEMORY, HIDDEN, dtype=torch.float64)
    query, memory = operands(dtype=torch.float64)
    found, weights = layer(query, memory, padding=padded())
    for sample in range(BATCH):
        there = [position for position in range(POSITIONS) if not padded()[sample, position]]
        for step in range(STEPS):
            sums = [
                layer.query.weight @ query[sample, step] + layer.key.weight @ memory[sample, each] + layer.key.bias
                for each in there
            ]
            expected = torch.softmax(torch.stack([layer.score @ each.tanh() for each in sums]), 0)
            assert torch.allclose(weights[sample, step, there], expected)
            assert weights[sample, step].count_nonzero() == len(there)
            assert torch.allclose(found[sample, step], expected @ memory[sample, there])


def saved_bytes(layer, query, memory):
    """Return the bytes of all storages that autograd keeps after forward, without parameters."""
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = tensor  # held, so that no address occurs twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = layer(query, memory)
    assert result[0].grad_fn is not None
    for parameter in layer.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("steps", [4, 16])
def test_neither_the_sum_nor_its_tanh_is_saved(steps):
    plain, ours = both()
    tanh = 4 * BATCH * POSITIONS * HIDDEN  # of one decoder step
    projected = 4 * BATCH * HIDDEN * (steps + POSITIONS)
    inputs = 4 * BATCH * (steps * QUERY + POSITIONS * MEMORY)
    weights = 4 * BATCH * steps * POSITIONS
    assert saved_bytes(ours, *operands(steps)) == inputs + projected + weights
    assert saved_bytes(plain, *operands(steps)) == inputs + weights + steps * tanh


def layer_peak(kind, steps):
    """Return the bytes of a training step on T decoder steps and as many positions beyond what is there before."""
    layer = kind(64, 64, 64)
    query = torch.randn(2, steps, 64)
    step = step_of(layer, query, loss=lambda outputs: outputs[0].sum())
    step = type(step)(model=layer, inputs=(query, torch.randn(2, steps, 64)), loss=step.loss)
    before = sum(4 * each.numel() for each in (*layer.parameters(), *step.inputs))
    step.run()
    return peak_bytes(step) - before


@pytest.mark.parametrize("steps", [64, 128])
def test_the_peak_of_a_step_grows_with_the_decoder_steps_and_not_with_their_square(steps):
    row, scores = 4 * 2 * steps * 64, 4 * 2 * steps * steps
    found, plain = layer_peak(AdditiveAttention, steps), layer_peak(StepByStepAttention, steps)
    assert found < 10 * row + 5 * scores
    assert plain > steps * row


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(BATCH, QUERY)}, "query is 3 x 6, and 3 x 6 x 6 is needed"),
        ({"query": torch.zeros(2, STEPS, QUERY)}, "query is 2 x 5 x 6, and 3 x 5 x 6 is needed"),
        ({"keys": torch.zeros(BATCH, POSITIONS, 1)}, "keys is 3 x 7 x 1, and 3 x 7 x 8 is needed"),
        ({"padding": torch.zeros(POSITIONS)}, "padding is 7, and 3 x 7 is needed"),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(changes, message):
    layer = AdditiveAttention(QUERY, MEMORY, HIDDEN)
    query, memory = operands()
    arguments = {"query": query, "memory": memory} | changes
    with pytest.raises(InvalidValueError, match=re.escape(message)):
        layer(**arguments)
