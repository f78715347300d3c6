"""Tests of what a trace says of tensors whose fakes differ from what an operator returns."""

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from ucudnn.memory.torch.provenance import Provenance  # noqa: E402
from ucudnn.memory.torch.tracer import Tracer  # noqa: E402

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
