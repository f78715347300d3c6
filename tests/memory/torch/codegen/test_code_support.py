"""Tests of what generated code checks in its first step."""

import pytest
import torch

import ucudnn.memory
from ucudnn.errors import StepGraphError
from ucudnn.memory.torch.codegen.code_support import arrive, check_geometry, check_gone, leave, watched

HERE = torch.device("cpu")


TRACED = (2, 3), (3, 1), 0, 24
SINGLE = torch.zeros(512).as_strided((8, 1, 4), (64, 7, 16))
NONE = torch.zeros(1, 0)
META = torch.zeros(2, 3, device="meta")


@pytest.mark.parametrize(
    ("tensor", "traced", "device"),
    [
        (torch.zeros(2, 3), TRACED, HERE),
        (NONE, ((1, 0), (0, 1), 0, 0), HERE),  # strides without elements say nothing
        (SINGLE, ((8, 1, 4), (64, 64, 16), 0, 2048), HERE),  # nor does that of a single entry
        (META, TRACED, None),  # any device, because no plan moves it
    ],
)
def test_a_tensor_as_it_was_traced_passes(tensor, traced, device):
    check_geometry(tensor, traced, device, "aten.zeros", torch.float32)


@pytest.mark.parametrize(
    ("tensor", "traced"),
    [
        *((each, TRACED) for each in (torch.zeros(3, 2), torch.zeros(3, 2).t())),
        *((each.view(2, 3), TRACED) for each in (torch.zeros(7)[1:], torch.zeros(7)[:6])),
        *((NONE, each) for each in (((0, 1), (1, 1), 0, 0), ((1, 0), (0, 1), 0, 4))),
        (SINGLE, ((8, 1, 4), (32, 7, 16), 0, 2048)),
        (SINGLE, ((8, 1, 4), (64, 7, 16), 1, 2048)),
        (SINGLE, ((8, 1, 4, 1), (64, 7, 16, 1), 0, 2048)),
    ],
)
def test_a_tensor_that_lies_otherwise_is_refused(tensor, traced):
    with pytest.raises(StepGraphError, match="other elements"):
        check_geometry(tensor, traced, HERE, "aten.zeros", torch.float32)


def test_a_tensor_of_another_type_is_refused_although_it_has_the_bytes():
    with pytest.raises(StepGraphError, match=r"torch\.int32, but its trace on fake tensors says torch\.float32"):
        check_geometry(torch.zeros(2, 3, dtype=torch.int32), TRACED, HERE, "aten.zeros", torch.float32)


def test_a_tensor_on_another_device_is_refused_where_a_plan_may_move_it():
    with pytest.raises(StepGraphError, match=r"aten\.zeros returned a tensor on meta.*says cpu"):
        check_geometry(META, TRACED, HERE, "aten.zeros", torch.float32)


def test_code_calls_operators_without_the_frame_of_python_that_torch_ops_puts_around_them():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    step = ucudnn.memory.fit(
        model, (torch.randn(2, 4), torch.tensor([0, 1])), loss=torch.nn.functional.cross_entropy, policy="checkpoint"
    )
    names = step._run.code.forward.__globals__
    operators = {name: each for name, each in names.items() if name.startswith("aten_")}
    assert "aten_addmm_default" in operators
    assert {type(each).__name__ for each in operators.values()} == {"builtin_function_or_method"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_bytes_that_left_a_storage_arrive_in_another_one_after_it_is_gone(dtype):
    tensor = torch.randn(3, 5).to(dtype)
    expected, left, gone = tensor.clone(), leave(tensor), watched(tensor)
    with pytest.raises(StepGraphError, match="a was freed by the plan, but something still holds it"):
        check_gone(gone, "a")
    del tensor
    check_gone(gone, "a")
    other = torch.empty(3, 5, dtype=dtype)
    arrive(other, left)
    assert torch.equal(other, expected)
