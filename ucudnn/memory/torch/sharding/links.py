"""The link between ranks as they measure it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter

import torch

from ucudnn.memory.step.sharded import RankLink

_SMALL, _LARGE = 1 << 10, 1 << 24  # bytes of a rank that are gathered to be timed
_REPEATS = 5


def measured_link(gather: Callable[[torch.Tensor], object], ranks: int, device: torch.device) -> RankLink:
    """Return the link as all-gathers of two sizes show it on this rank; all ranks measure together.

    Nothing is measured on a CPU, whose link is assumed.
    """
    if device.type != "cuda" or ranks == 1:
        return RankLink(ranks=ranks)
    seconds = []
    for size in (_SMALL, _LARGE):
        own, times = torch.zeros(size, dtype=torch.uint8, device=device), []
        for _ in range(_REPEATS + 1):  # the first one connects the ranks
            torch.cuda.synchronize(device)
            begin = perf_counter()
            gather(own)
            torch.cuda.synchronize(device)
            times.append(perf_counter() - begin)
        seconds.append(median(times[1:]))
    torch.cuda.empty_cache()
    others, (small, large) = ranks - 1, (1e3 * each for each in seconds)
    bandwidth = others * (_LARGE - _SMALL) / max(large - small, 1e-3)
    return RankLink(ranks=ranks, latency_ms=small / others, bytes_per_ms=bandwidth, source="measured")


def slowest(links: Sequence[RankLink]) -> RankLink:
    """Return a link that is as slow as the slowest of several in each number."""
    return replace(
        links[0],
        latency_ms=max(each.latency_ms for each in links),
        bytes_per_ms=min(each.bytes_per_ms for each in links),
    )
