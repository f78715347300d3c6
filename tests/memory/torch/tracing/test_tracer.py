"""Tests of what a trace says of tensors whose fakes differ from what an operator returns, and of its flops."""

import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.strategies import examples
from tests.support.training_steps import step_of, trace_step
from ucudnn.memory.torch.tracing.provenance import Provenance
from ucudnn.memory.torch.tracing.tracer import Tracer

aten = torch.ops.aten


@pytest.mark.parametrize("operator", ["efficient", "cudnn"])
def test_the_seed_of_dropout_in_an_attention_lies_on_the_host_where_backward_reads_it(operator):
    with FakeTensorMode(), Tracer(Provenance(torch.nn.Identity())) as tracer:
        query = torch.empty(2, 2, 16, 8, device="cuda", dtype=torch.float16)
        attend = getattr(aten, f"_scaled_dot_product_{operator}_attention").default
        results = attend(query, query, query, None, True, 0.1)
        scalars = [each for each in results if isinstance(each, torch.Tensor) and not each.dim()]
        storages = {tracer.find(each) for each in scalars}
    assert len(storages) == 2
    assert {tracer.trace.storages[each].device for each in storages} == {"cpu"}
    assert tracer.trace.storages[tracer.trace.calls[-1].results[0].storage].device == "cuda"


def flops_of(function, *inputs):
    """Return the flops of a function's forward and backward."""
    with Tracer(Provenance(torch.nn.Identity())) as tracer:
        out = function(*inputs)
    with Tracer(Provenance(torch.nn.Identity())) as backward:
        out.backward(torch.ones_like(out))
    return [sum(call.flops for call in each.trace.calls) for each in (tracer, backward)]


@st.composite
def convolutions(draw):
    """Draw a convolution of 1 to 3 dimensions, grouped, depthwise, strided, dilated or transposed, and its input."""
    dimensions, groups = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    of_group = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    options = {name: draw(st.tuples(*[st.integers(1, 2)] * dimensions)) for name in ("stride", "dilation")}
    transposed = draw(st.booleans())
    kind = getattr(torch.nn, f"Conv{'Transpose' * transposed}{dimensions}d")
    kernel = draw(st.tuples(*[st.integers(1, 3)] * dimensions))
    channels, filters = (each * groups for each in of_group)
    padding = draw(st.integers(0, 1))
    convolution = kind(channels, filters, kernel, groups=groups, padding=padding, bias=draw(st.booleans()), **options)
    sizes = draw(st.tuples(*[st.integers(5, 7)] * dimensions))
    return convolution, torch.ones(draw(st.integers(1, 3)), channels, *sizes)


def multiplications(convolution, x):
    """Count the products of a convolution: with ones only and nothing cropped, its output is their number."""
    ones = torch.ones_like(convolution.weight)
    name = f"conv{'_transpose' * convolution.transposed}{x.dim() - 2}d"
    if not convolution.transposed:
        x = torch.ones_like(torch.nn.functional.pad(x, convolution._reversed_padding_repeated_twice))
    options = {each: getattr(convolution, each) for each in ("stride", "dilation", "groups")}
    return int(getattr(torch.nn.functional, name)(x, ones, **options).double().sum())


@examples(1 / 3)
@given(convolutions(), st.booleans(), st.booleans())
@example((torch.nn.Conv2d(8, 8, 3, groups=8), torch.ones(2, 8, 6, 6)), True, True).via("depthwise")
def test_a_convolution_has_the_flops_of_its_problem_in_each_direction(drawn, of_input, of_weight):
    convolution, x = drawn
    convolution.weight.requires_grad_(of_weight)
    products = 2 * multiplications(convolution, x)
    if of_input or of_weight or convolution.bias is not None:
        counted = flops_of(convolution, x.clone().requires_grad_(of_input))
        assert counted == [products, products * (of_input + of_weight)]


def test_each_operation_of_a_grouped_convolution_has_the_flops_of_its_problem():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 1), torch.nn.Conv2d(8, 4, 3, groups=4))
    graph = trace_step(step_of(model, torch.ones(2, 3, 6, 6)), "one", 2).graph
    found = [each for each in graph.operations if each.problem is not None]
    assert len(found) == 5
    for each in found:
        assert each.flops.at(2) == 2 * each.problem.with_batch(each.problem_batch.at(2)).multiplications


def test_a_matrix_product_takes_twice_as_much_backward():
    given = (torch.ones(shape, requires_grad=True) for shape in [(7, 2, 3), (5, 3), (5,)])
    assert flops_of(torch.nn.functional.linear, *given) == [2 * 7 * 2 * 3 * 5, 4 * 7 * 2 * 3 * 5]


ATTENTIONS = ["flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"]


def given_to(operator, query, key, value):
    """Return arguments for an operator of attention: of its tensors' other ones and numbers, any that are valid."""
    values = {"query": query, "key": key, "value": value, "grad_input_mask": [True, True, True, False]}
    of_type = {"Tensor": query, "float": 0.0, "bool": False, "int": 16}
    wanted = [each for each in operator._schema.arguments if not each.kwarg_only]
    return [values.get(each.name, of_type.get(str(each.type))) for each in wanted]


@pytest.mark.parametrize("heads", [6, 2])
@pytest.mark.parametrize("kind", ATTENTIONS)
@pytest.mark.parametrize(("end", "products"), [("", 2), ("_backward", 5)])
def test_attention_has_two_products_forward_and_five_backward(kind, end, products, heads):
    operator = getattr(aten, f"_scaled_dot_product_{kind}{end}").default
    device = "cpu" if kind.endswith("cpu") else "cuda"
    with FakeTensorMode(), Tracer(Provenance(torch.nn.Identity())) as tracer:
        query, key, value = (
            torch.empty(2, each, length, 8, device=device, dtype=torch.float16)
            for each, length in ((6, 16), (heads, 24), (heads, 24))
        )
        operator(*given_to(operator, query, key, value))
    assert tracer.trace.calls[-1].flops == products * 2 * 2 * 6 * 16 * 24 * 8


def test_attention_on_a_cpu_has_the_flops_of_its_products():
    query, key, value = (torch.ones(2, 6, length, 8, requires_grad=True) for length in (16, 24, 24))
    product = 2 * 2 * 6 * 16 * 24 * 8
    assert flops_of(torch.nn.functional.scaled_dot_product_attention, query, key, value) == [2 * product, 5 * product]


def test_ctrl_c_while_a_storage_dies_reaches_the_caller_and_the_trace_knows_of_the_storage():
    def interrupt(frame, event, _):
        if event == "call" and frame.f_code.co_filename.endswith("tracer.py"):
            raise KeyboardInterrupt

    with Tracer(Provenance(torch.nn.Identity())) as tracer:
        dead = torch.ones(4) * 2
        storage = tracer.find(dead)
        sys.setprofile(interrupt)
        try:
            del dead  # no code of Python runs here, in which an error would be swallowed
        finally:
            sys.setprofile(None)
        for _ in range(3):  # at the same address
            made = torch.ones(4) * 2
            assert tracer.find(made) not in (storage, None)
            del made
    assert tracer.trace.storages[storage].died == 2


def test_a_storage_at_the_address_of_another_one_is_another_storage():
    tracer = Tracer(Provenance(torch.nn.Identity()))
    first, second = torch.ones(4), torch.ones(4)
    index = tracer.meet(first)
    tracer._known[second.untyped_storage()._cdata] = tracer._known[first.untyped_storage()._cdata]
    assert tracer.find(second) is None
    assert tracer.meet(second) != index
