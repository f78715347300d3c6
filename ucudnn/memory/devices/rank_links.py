"""Links between the GPUs of a host, by device, where nobody has stated or measured them."""

from ucudnn.memory.step.costs import Costs
from ucudnn.memory.step.sharded import RankLink

NVLINK_BYTES = {"h200": 450e9, "h100": 450e9, "a100-80": 300e9, "a100-40": 300e9, "v100": 150e9, "p100": 80e9}
"""Bytes per second in one direction of all NVLinks of a GPU, by NVIDIA's specifications."""


def link_between(ranks: int, costs: Costs, gigabytes: float | None = None, latency_ms: float | None = None) -> RankLink:
    """Return the link between ranks. What nobody states is the device's: NVLink, or else its link to the host.

    Each rank has a bandwidth of so many gigabytes (10^9 bytes) per second; between hosts, that of the slowest link.
    """
    known = NVLINK_BYTES.get(costs.device)
    own = costs.prefetch_bytes_per_ms if known is None else known / 1e3
    return RankLink(
        ranks=ranks,
        latency_ms=RankLink.latency_ms if latency_ms is None else latency_ms,
        bytes_per_ms=own if gigabytes is None else gigabytes * 1e6,
        source=f"assumed for {costs.device}" if gigabytes is None else "stated",
    )
