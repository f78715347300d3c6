"""The graphs that cuDNN is given, and the tensors with which their plans are executed."""

import gc
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.support.described_graphs import DescribingLibrary
from tests.support.problems import make_problem
from ucudnn.arrays import BiasedFilters
from ucudnn.backends.base import ACCUMULATE, BEGIN, OVERWRITE, Offset, Scaling
from ucudnn.backends.cudnn.algorithms import graph_call
from ucudnn.backends.cudnn.algorithms.graph_call import GraphCall
from ucudnn.backends.cudnn.algorithms.operation_graph import OperationGraph
from ucudnn.backends.cudnn.api.enums import DATA_FLOAT, DATA_TYPES, POINTWISE_ADD, Attribute, DescriptorType
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer
from ucudnn.errors import CudnnError, UnsupportedProblemError
from ucudnn.problem import DataType, Layout

WORKSPACE = DeviceBuffer(1 << 20, 512)
PROBLEM = make_problem(dtype=DataType.BFLOAT16, alignment=8)


def call_of(problem, name="eng7", scalings=(OVERWRITE,)):
    library = DescribingLibrary()

    def graph(asked, scaling):
        return OperationGraph(library, 5, asked, scaling)

    return GraphCall(library, 5, problem, name, scalings, graph), library


def launched(problem, w, offset=BEGIN):
    """Launch a call; return cuDNN, the operations of the graph, and the pointers by the identity of tensors."""
    call, library = call_of(problem)
    call.launch(4096, w, 8192, WORKSPACE, offset)
    ((plan, pack),) = library.executed
    given = library.made[pack]
    ids, pointers = given[Attribute.VARIANT_PACK_UNIQUE_IDS], given[Attribute.VARIANT_PACK_DATA_POINTERS]
    return library, library.graph(plan), dict(zip(ids, pointers, strict=True))


def identity(tensor):
    return tensor[Attribute.TENSOR_UNIQUE_ID][0]


def test_a_plan_that_a_first_launch_builds_does_not_end_a_capture(monkeypatch):
    """Whatever it compiles and loads: a plan with other factors may be needed first in a capture."""
    within, built = [], []

    @contextmanager
    def noted():
        within.append(True)
        yield
        within.pop()

    monkeypatch.setattr(graph_call, "relaxed", noted)
    build = GraphCall._build
    monkeypatch.setattr(
        GraphCall, "_build", lambda self, scaling: built.append((scaling, bool(within))) or build(self, scaling)
    )
    call, library = call_of(PROBLEM)
    for _ in range(2):
        call.launch(4096, 6144, 8192, WORKSPACE)
        call.launch(4096, 6144, 8192, WORKSPACE, scaling=ACCUMULATE)
    assert built == [(OVERWRITE, False), (ACCUMULATE, True)]
    assert len(library.executed) == 4
    assert not within


def test_without_a_bias_the_graph_is_the_convolution():
    library, operations, pointers = launched(PROBLEM, 6144)
    (convolution,) = operations
    assert convolution["kind"] is DescriptorType.FORWARD
    tensors = [library.made[convolution[Attribute.FORWARD_ALPHA + place][0]] for place in (4, 3, 5)]
    assert dict(zip(map(identity, tensors), (4096, 6144, 8192), strict=True)) == pointers
    assert not any(Attribute.TENSOR_IS_VIRTUAL in each for each in library.made.values())


@pytest.mark.parametrize(
    ("layout", "strides"), [(Layout.NCHW, [4, 1, 1, 1]), (Layout.NHWC, [4, 1, 4, 4])], ids=lambda each: str(each)
)
def test_a_bias_is_added_to_what_has_no_memory(layout, strides):
    problem = replace(PROBLEM, layout=layout, biased=True)
    library, (convolution, addition), pointers = launched(problem, BiasedFilters(6144, 7168))
    assert (convolution["kind"], addition["kind"]) == (DescriptorType.FORWARD, DescriptorType.OPERATION_POINTWISE)
    between = library.made[addition[Attribute.OPERATION_POINTWISE_XDESC][0]]
    assert convolution[Attribute.FORWARD_ALPHA + 5] == addition[Attribute.OPERATION_POINTWISE_XDESC]
    assert between[Attribute.TENSOR_IS_VIRTUAL] == [True]
    assert between[Attribute.TENSOR_DATA_TYPE] == [DATA_FLOAT]  # rounded once, after the addition
    assert identity(between) not in pointers
    (what,) = (library.made[each] for each in addition[Attribute.OPERATION_POINTWISE_PW_DESCRIPTOR])
    assert (what[Attribute.POINTWISE_MODE], what[Attribute.POINTWISE_MATH_PREC]) == ([POINTWISE_ADD], [DATA_FLOAT])
    bias = library.made[addition[Attribute.OPERATION_POINTWISE_BDESC][0]]
    y = library.made[addition[Attribute.OPERATION_POINTWISE_YDESC][0]]
    assert (pointers[identity(bias)], pointers[identity(y)]) == (7168, 8192)
    assert len(pointers) == 4
    assert bias[Attribute.TENSOR_DIMENSIONS] == [1, 4, 1, 1]
    assert bias[Attribute.TENSOR_STRIDES] == strides
    assert bias[Attribute.TENSOR_DATA_TYPE] == [DATA_TYPES[DataType.BFLOAT16]]
    assert bias[Attribute.TENSOR_BYTE_ALIGNMENT] == [8]
    assert between[Attribute.TENSOR_STRIDES] == y[Attribute.TENSOR_STRIDES]


def test_a_micro_batch_has_the_same_bias():
    problem = replace(PROBLEM, biased=True)
    *_, pointers = launched(problem.part(2), BiasedFilters(6144, 7168), Offset(2))
    moved = 4096 + 2 * problem.steps[0], 6144, 8192 + 2 * problem.steps[1], 7168
    assert sorted(pointers.values()) == sorted(moved)


def test_a_graph_with_a_bias_adds_to_no_earlier_output():
    with pytest.raises(UnsupportedProblemError, match="does not add to what the output holds"):
        call_of(replace(PROBLEM, biased=True), scalings=(Scaling(1.0, 1.0),))
    call_of(PROBLEM, scalings=(Scaling(1.0, 1.0),))


def test_what_cudnn_does_not_support_is_an_error():
    with pytest.raises(CudnnError, match="3000"):
        call_of(replace(PROBLEM, biased=True), "eng8")


def plans_of(library):
    return [address for address, given in library.made.items() if given["kind"] is DescriptorType.EXECUTION_PLAN]


def borrowed():
    """Return a call on handle 5, a call on handle 6 that takes its plan, and their library."""
    lender, library = call_of(PROBLEM)

    def graph(asked, scaling):
        return OperationGraph(library, 6, asked, scaling)

    return lender, GraphCall(library, 6, PROBLEM, "eng7", (OVERWRITE,), graph, lender), library


def test_a_plan_that_is_lent_is_not_built_again_and_runs_on_the_borrowers_handle():
    lender, call, library = borrowed()
    (plan,) = plans_of(library)
    call.launch(4096, 6144, 8192, WORKSPACE)
    lender.launch(4096, 6144, 8192, WORKSPACE)
    assert [executed for executed, _ in library.executed] == [plan, plan]
    assert library.handles == [6, 5]
    call.launch(4096, 6144, 8192, WORKSPACE, BEGIN, Scaling(1.0, 1.0))  # which the lender does not have
    assert len(plans_of(library)) == 2


def test_a_lent_plan_outlives_the_call_that_built_it():
    lender, call, library = borrowed()
    destroyed = []
    library.cudnnBackendDestroyDescriptor = lambda address: destroyed.append(address) or 0
    (plan,) = plans_of(library)
    del lender
    call.launch(4096, 6144, 8192, WORKSPACE)
    assert plan not in destroyed


def test_after_a_lent_plan_is_refused_a_plan_of_its_own_runs():
    _, call, library = borrowed()
    library.refuses = True
    with pytest.raises(CudnnError, match="2000"):
        call.launch(4096, 6144, 8192, WORKSPACE)
    call.launch(4096, 6144, 8192, WORKSPACE)
    lent, own = plans_of(library)
    ((executed, _),) = library.executed
    assert executed == own != lent
    assert library.handles == [6]


def test_a_launch_at_other_addresses_leaves_one_object_for_pythons_collector():
    call, library = call_of(PROBLEM)

    def launch(number):
        call.launch(4096 + 64 * number, 6144, 8192, WORKSPACE)

    launch(0)
    gc.collect()
    before = len(gc.get_objects())
    for number in range(1, 101):
        launch(number)
    executed = len(library.executed)
    del library.executed[:], library.handles[:]
    library.made.clear()  # the stand-in's own
    gc.collect()
    assert executed == 101
    assert len(gc.get_objects()) - before <= 100


def test_a_plan_keeps_its_configuration_and_neither_the_engine_nor_the_graph():
    call, library = call_of(PROBLEM)
    destroyed = []
    library.cudnnBackendDestroyDescriptor = lambda address: destroyed.append(library.made[address]["kind"]) or 0
    graph = OperationGraph(library, 5, PROBLEM, OVERWRITE)
    plan = graph.plan("eng7")
    del graph
    gc.collect()
    kinds = set(destroyed)
    assert {DescriptorType.ENGINE, DescriptorType.OPERATIONGRAPH, DescriptorType.FORWARD} <= kinds
    assert not kinds & {DescriptorType.ENGINECFG, DescriptorType.EXECUTION_PLAN}
    del plan
    assert {DescriptorType.ENGINECFG, DescriptorType.EXECUTION_PLAN} <= set(destroyed)
    assert call.workspace_bytes == 512
