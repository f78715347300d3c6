"""The bounds on recorded times of an H200: what they leave out is in no desirable set."""

import pytest

from ucudnn.benchmarking.exploration.pruning import Pruning
from ucudnn.solvers.desirable import desirable_set


@pytest.mark.parametrize("network", ["alexnet", "resnet18", "resnet50"])
@pytest.mark.parametrize("limit", [8, 64, 4096])
def test_bounds_lose_nothing_of_the_recorded_fronts(recorded, network, limit):
    """Replay the order of the measurements on recorded times."""
    lost = kept = total = 0
    for kernel, measured in recorded(network):
        batch = kernel.problem.batch
        fitting = [micro for micro in measured if micro.workspace_bytes <= limit << 20]
        search, taken = Pruning(batch, whole=True), []
        by_size = {}
        for micro in fitting:
            by_size.setdefault(micro.size, []).append(micro)
        for size in search.order(sorted(by_size)):
            for micro in sorted(by_size[size], key=lambda micro: search.least_ms(size, micro.algorithm)):
                if search.least_ms(size, micro.algorithm) < search.worth_ms(size, micro.workspace_bytes, True):
                    search.add(micro)
                    taken.append(micro)
        front, found = desirable_set(fitting, batch), desirable_set(taken, batch)
        if front:
            lost += (found[-1].time_ms - front[-1].time_ms) * kernel.count
            total += front[-1].time_ms * kernel.count
        kept += len(taken) / max(1, len(fitting))
    assert lost <= 0.002 * total
    assert kept / len(recorded(network)) < 0.9
