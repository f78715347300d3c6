"""Sharing: several GPUs of one machine, or the ranks of a distributed program, measure together."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, final

from ucudnn.backends.base import Backend, ComputeBackend
from ucudnn.benchmarking.benchmark import Benchmark, Finding
from ucudnn.benchmarking.parallel.partition import Group, dealt, requests_in
from ucudnn.benchmarking.parallel.processes import WorkerOptions, Workers
from ucudnn.benchmarking.request import Request
from ucudnn.errors import BackendError, SettingsError


@final
class Ranks:
    """The ranks of torch.distributed: each measures a part, and all end with the same results, and so the same plans.

    All ranks must plan the same problems in the same order, as replicas of one model do.

    Raises:
        SettingsError: if torch.distributed is not initialized.
    """

    collective = True

    def __init__(self) -> None:
        # Whoever has ranks has imported it; nobody else need have PyTorch.
        self._distributed: Any = sys.modules.get("torch.distributed")
        if self._distributed is None or not self._distributed.is_initialized():
            raise SettingsError(
                "UCUDNN_BENCHMARK_DEVICES=ranks: torch.distributed is not initialized: call init_process_group before"
                " the handle is made"
            )

    def ready(self) -> None:
        """Nothing to wait for: ranks wait for each other when they explore."""

    def explore(self, requests: Sequence[Request], own: Benchmark) -> Iterable[Finding]:
        """Return findings of all requests, the same on every rank.

        Raises:
            BackendError: if a rank failed, or plans something else.
        """
        distributed = self._distributed
        world, rank = distributed.get_world_size(), distributed.get_rank()
        try:
            mine: object = _found(dealt(requests, world)[rank], own)
        except Exception as error:  # noqa: BLE001  # the others wait: they must hear of it
            mine = error
        gathered: list[Any] = [None] * world
        distributed.all_gather_object(gathered, (list(requests), mine))
        for other, (theirs, answer) in enumerate(gathered):
            if isinstance(answer, Exception):
                raise BackendError(f"rank {other} failed to measure: {answer}") from answer
            if theirs != list(requests):
                raise BackendError(f"rank {other} plans other problems than rank {rank}: plan the same ones in order")
        return [finding for _, findings in gathered for finding in findings]


def open_share(
    backend: Backend, devices: tuple[int, ...] | str | None, options: WorkerOptions
) -> Workers | Ranks | None:
    """Return who else measures, as UCUDNN_BENCHMARK_DEVICES says it, or None.

    Args:
        backend: this process's own.
        devices: numbers, 'all', 'ranks', or None for this process alone.
        options: how others measure.

    Raises:
        SettingsError: if a GPU is not there, or there are no ranks.
    """
    if devices is None or not isinstance(backend, ComputeBackend):
        return None
    if devices == "ranks":
        return Ranks()
    wanted = tuple(backend.devices()) if isinstance(devices, str) else devices
    if wanted == (backend.device(),):
        return None
    return Workers(backend, wanted, options)


def _found(share: list[Group], own: Benchmark) -> list[Finding]:
    """Return what is found for a share, which ends with it."""
    own.begin([request for request in requests_in(share) if not own.knows(request)])
    found: list[Finding] = []
    while share:
        group = share.pop(own.choose([each.problem for each in share]))
        found += map(own.find, group.requests)
    return found
