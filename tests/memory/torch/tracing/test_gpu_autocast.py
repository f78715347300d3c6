"""Autocast on the CPU casts by the lists of CUDA, which a header of PyTorch has, and afterwards as before."""

import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from ucudnn.memory.torch.tracing import gpu_autocast as module
from ucudnn.memory.torch.tracing.gpu_autocast import gpu_autocast

pytestmark = pytest.mark.extra


def listed(name):
    """Return the operators of a list of PyTorch's header, which CUDA takes."""
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    macro = re.search(rf"#define AT_FORALL_{name}\(_\)(.*?)\n\n", header, re.DOTALL)[1]
    found = {".".join(filter(None, each)) for each in re.findall(r"_\((\w+)(?:, (\w+))?\)", macro)}
    return {
        each for each in found if not re.search("imname|names", each)
    }  # PyTorch had names of dimensions before 2.13


def test_each_operator_is_cast_as_pytorchs_header_says():
    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    of_cpu, of_gpu = ({*registered(f"Autocast{key}")} for key in ("CPU", "CUDA"))
    other = {each.removeprefix("aten::") for each in of_gpu - of_cpu if not re.search("imname|names", each)}
    assert other & listed("FP32_SET_OPT_DTYPE") == module._TO_DTYPE & other
    assert listed("LOWER_PRECISION_FP") >= module._TO_16_BITS
    left_to_others = {each for each in other & listed("LOWER_PRECISION_FP") if each not in module._TO_16_BITS}
    assert left_to_others | (other & listed("PROMOTE")) <= module._AS_ON_CPUS
    rest = other - module._TO_DTYPE - module._TO_16_BITS - module._AS_ON_CPUS
    rest.discard("_cudnn_rnn")  # CUDA's own, which no list has and a trace refuses
    assert rest == other & listed("FP32")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types_are_those_of_a_gpu_and_afterwards_of_the_cpu(dtype):
    with FakeTensorMode():
        x, w, label = torch.randn(2, 4, 8, 8, 8, dtype=dtype), torch.randn(4), torch.zeros(2, 8, 8, 8, dtype=torch.long)
        calls = {
            "softmax": lambda: x.softmax(1),
            "sum": lambda: x.sum((2, 3)),
            "layer_norm": lambda: functional.layer_norm(x, (8,)),
            "pow": lambda: x**2,
            "avg_pool3d": lambda: functional.avg_pool3d(x, 2),
            "instance_norm": lambda: functional.instance_norm(x, weight=w, bias=w),
            "conv3d": lambda: functional.conv3d(x.float(), w.new_zeros(8, 4, 3, 3, 3), padding="same"),
            "cross_entropy": lambda: functional.cross_entropy(x, label),
        }

        def types():
            with torch.autocast("cpu", dtype):
                return {name: called().dtype for name, called in calls.items()}

        before = types()
        with gpu_autocast():
            found = types()
        assert types() == before
    wide = {name for name, each in found.items() if each is torch.float32}
    assert wide == {"softmax", "sum", "layer_norm", "pow", "cross_entropy"}
    assert {*found.values()} == {torch.float32, dtype}
    assert before["softmax"] is dtype
    assert before["avg_pool3d"] is torch.float32
