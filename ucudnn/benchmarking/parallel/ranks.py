"""The ranks of a distributed program measure together."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, final

from ucudnn.benchmarking.findings import Finding
from ucudnn.benchmarking.measurer import Measurer
from ucudnn.benchmarking.parallel.partition import balanced, requests_in
from ucudnn.benchmarking.request import Request
from ucudnn.errors import BackendError, SettingsError, UcudnnError


@final
class Ranks:
    """The ranks of torch.distributed. Each measures a share, and all end with the same findings and plans.

    All ranks must plan the same problems in the same order, as replicas of one model do.

    Args:
        name: what the user calls the setting that is 'ranks', for errors.

    Raises:
        SettingsError: if torch.distributed is not initialized.
    """

    collective = True

    def __init__(self, name: str = "benchmark_devices") -> None:
        # A program with ranks has imported it already; other programs need no PyTorch.
        self._distributed: Any = sys.modules.get("torch.distributed")
        if self._distributed is None or not self._distributed.is_initialized():
            raise SettingsError(
                f"{name}=ranks: torch.distributed is not initialized: call init_process_group before the handle is made"
            )

    def ready(self) -> None:
        """Do nothing, because ranks wait for each other when they explore."""

    def explore(self, requests: Sequence[Request], own: Measurer) -> Iterable[Finding]:
        """Return the findings of all requests, which are the same on every rank.

        Raises:
            BackendError: if a rank failed, or plans other problems.
        """
        distributed = self._distributed
        world, rank = distributed.get_world_size(), distributed.get_rank()
        failure: Exception | None = None
        try:
            share = balanced(requests, world)[rank]
            own.begin([request for request in requests_in(share) if not own.knows(request)])
            found: list[Finding] = []
            while share:
                group = share.pop(own.choose([each.problem for each in share]))
                found += map(own.find, group.requests)
            mine: object = found
        except Exception as error:  # noqa: BLE001  # the other ranks wait for this one, so they get the error
            failure = error
            # As text, because not every error can be pickled.
            mine = str(error) if isinstance(error, UcudnnError) else f"{type(error).__name__}: {error}"
        gathered: list[Any] = [None] * world
        distributed.all_gather_object(gathered, (list(requests), mine))
        for other, (theirs, answer) in enumerate(gathered):
            if isinstance(answer, str):
                raise BackendError(f"rank {other} failed to measure: {answer}") from failure
            if theirs != list(requests):
                raise BackendError(f"rank {other} plans other problems than rank {rank}: plan the same ones in order")
        return [finding for _, findings in gathered for finding in findings]
