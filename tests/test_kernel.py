"""Keys of kernels: what a handle knows a kernel by."""

import pytest

from tests.support.problems import make_problem
from ucudnn.kernel import Kernel, KernelKey

PROBLEM = make_problem()
DIFFERENT = {"layer": "conv2", "problem": make_problem(batch=9), "spare_bytes": 64, "fresh": True}


@pytest.mark.parametrize("field", DIFFERENT)
def test_a_key_tells_its_kernel_from_others(field):
    plain, other = KernelKey("conv1", PROBLEM), KernelKey("conv1", PROBLEM)._replace(**{field: DIFFERENT[field]})
    assert plain != other
    assert plain.kernel() == Kernel(layer="conv1", problem=PROBLEM)
    assert getattr(other.kernel(), field) == DIFFERENT[field]
    assert len({plain.kernel(), other.kernel()}) == 2


def test_a_key_has_each_field_that_a_handle_sets():
    assert {*KernelKey._fields, "count"} == set(Kernel.__dataclass_fields__)
