"""Copies that nothing waits for, on a GPU: they run beside compute, and their memory goes back."""

import pytest

torch = pytest.importorskip("torch")

from bench.memory.contention import FreeCopies  # noqa: E402
from bench.memory.trial_series import SeriesMember, TrialSeries  # noqa: E402
from ucudnn.memory.simulation.result import Queue  # noqa: E402
from ucudnn.memory.torch.comparison.device_timeline import measure_timeline  # noqa: E402
from ucudnn.memory.torch.comparison.trial_result import TrialSettings  # noqa: E402
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch has no GPU")
UNET = TrainingRecipe(model="bench.memory.models:unet2d", batch=2, shape=(3, 256, 256))
SETTINGS = TrialSettings(recipe=UNET, policy="", budget=None, device="cuda", steps=3, warmup=1)


@pytest.fixture(scope="module")
def series():
    return TrialSeries(SETTINGS)


def requested_bytes(device):
    return torch.cuda.memory_stats(device)["requested_bytes.all.current"]


@pytest.mark.alone
def test_free_copies_move_their_bytes_beside_compute_and_go_back(series):
    fitted = series._fitted(SeriesMember("vdnn-ext-all-p"))
    device = torch.device("cuda", torch.cuda.current_device())
    weights, product = torch.randn(8192, 8192, device=device), torch.empty(8192, 8192, device=device)
    torch.mm(weights, weights, out=product)  # cuBLAS takes a workspace at its first call
    before, requested = torch.cuda.memory_allocated(device), requested_bytes(device)
    copies = FreeCopies(fitted.plan, device)
    assert requested_bytes(device) - requested == copies.buffer_bytes  # up to 1 MiB of a segment may be left beside it
    assert copies.buffer_bytes >= copies.bytes_of(to_host=True) == fitted.simulation.offloaded_bytes > 0
    assert copies._block.memory.is_pinned()
    copies._buffer.fill_(7)
    copies.begin(to_host=True)  # alone, because copies in the other direction write what these read
    copies.settle()
    torch.cuda.synchronize(device)
    assert int((copies._block.memory == 7).sum()) >= copies.bytes_of(to_host=True)

    def run():
        copies.begin(to_host=True)
        copies.begin(to_host=False)
        for _ in range(20):
            torch.mm(weights, weights, out=product)
        copies.settle()

    run()
    found = measure_timeline(run, device, None)
    assert found is not None, "PyTorch's profiler does not see this GPU"
    assert min(found.busy_ms(Queue.TO_HOST), found.busy_ms(Queue.FROM_HOST)) > 0
    assert found.overlap > 0.4
    memory = copies._block.memory
    copies.close()
    assert not memory.is_pinned()
    assert torch.cuda.memory_allocated(device) == before
    fitted.close()


def test_three_kinds_of_steps_take_turns(series):
    found, turns = series.run(SeriesMember("swap-hidden", contention=True))
    assert found.figures is not None, found.reason
    assert turns.to_host == turns.from_host == found.figures.offloaded > 0
    assert len(turns.rounds) == SETTINGS.steps
    assert min(map(min, turns.rounds)) > 0
    assert turns.contention_low_ms <= turns.contention_ms <= turns.contention_high_ms
