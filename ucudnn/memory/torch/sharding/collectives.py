"""Collectives as operators of a step, in a namespace of their own: `all_gather`, `reduce_scatter` and `all_reduce`.

Each returns memory of its own, so a plan may free what one has returned and run it again, as any other operation. All
ranks do so at the same place, because they have one plan. By these names a collective ends on the current stream before
what follows it. `start_all_gather` and the like only start it, on the group's stream, which waits for the current one
first. What it returns is there, and its operand may go, behind `wait`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count
from time import monotonic, sleep
from typing import Any, final
from weakref import ref

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from ucudnn.errors import FittedStepError
from ucudnn.memory.step.graph import RANKS

SILENCE = timedelta(seconds=55)
"""How long a rank waits for the others in a step; with what follows, a failing rank ends all within 60 seconds."""
PATIENCE = timedelta(minutes=30)
"""How long it waits for those that trace, measure or plan."""
_ROLL_CALL, _LINGERING = 3.0, 1.0  # seconds

_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # another name since PyTorch 2.13
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_RESOLVE: Any = vars(distributed_c10d)["_resolve_process_group"]
_LIBRARY = torch.library.Library(RANKS, "DEF")


@final
class RollCall:
    """Finds out which rank has failed, in the store in which the ranks have met."""

    def __init__(self) -> None:
        store = distributed_c10d._get_default_store()
        self._store: Any = torch._C._distributed_c10d.PrefixStore(f"ucudnn/{next(_NUMBERS)}", store)
        self._round = 0

    def begin_round(self) -> None:
        """Begin a step, as all ranks do: what failed before is over."""
        _WAITS.clear()
        self._round += 1

    def note_failure(self, error: BaseException) -> None:
        """Let the ranks that wait for this one know why it does not come, unless it has waited for them itself."""
        if isinstance(error, FittedStepError) and isinstance(error.__cause__, RuntimeError):
            return
        line, *_ = str(error).splitlines() or [""]
        with suppress(RuntimeError):  # the process that has the store may have ended
            told = f"rank {dist.get_rank()} has failed: {type(error).__name__}: {line}"
            self._store.set(f"{self._round}/failed", told)

    def missing(self, ranks: Sequence[int]) -> str:
        """Return which of some ranks has failed, as it said itself, or by its absence where others answer."""
        silent = [*ranks]
        failed = [f"{each}/failed" for each in (self._round, self._round - 1)]
        try:
            self._store.set(f"{self._round}/waits/{dist.get_rank()}", "")
            until = monotonic() + _ROLL_CALL
            while silent and monotonic() < until:
                silent = [each for each in ranks if not self._store.check([f"{self._round}/waits/{each}"])]
                for key in failed:
                    if self._store.check([key]):
                        return str(self._store.get(key).decode())
                sleep(0.05)
        except RuntimeError:  # the store ended with the process that has it
            return "the process with the ranks' store, as a rule that of rank 0, has ended"
        return f"rank {' and '.join(map(str, silent)) or 'unknown'} has ended, or does not come"


_GROUPS: dict[str, RollCall] = {}
"""What finds out of each group that was made here which of its ranks has failed, by its name."""
_NUMBERS = count()


def group_of(mesh: DeviceMesh, timeout: timedelta, roll: RollCall, backend: str | None = None) -> Any:
    """Return a new group of the ranks of a one-dimensional mesh, with a timeout of its own."""
    ranks, options = dist.get_process_group_ranks(mesh.get_group()), None
    nccl: Any = getattr(distributed_c10d, "ProcessGroupNCCL", None)
    if backend is None and mesh.device_type == "cuda" and nccl is not None:
        # Its kernels begin beside those of compute that were issued before, as FSDP2's do, and not behind them.
        options = nccl.Options(is_high_priority_stream=True)
        options._timeout = timeout
    given: dict[str, Any] = {"timeout": timeout, "backend": backend, "pg_options": options}
    group = dist.new_group(ranks, use_local_synchronization=True, **given)
    _GROUPS[group.group_name] = roll
    return group


def numbers(group: Any, number: int) -> list[int]:
    """Return what number each rank of a group of CPUs gives, in their order, with the same errors as `exchanged`."""
    found = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    started(group, _GATHER, found, torch.tensor([number]))()
    return [*map(int, found)]


def exchanged(group: Any, value: Any) -> list[Any]:
    """Return what all ranks of a group of CPUs give, in their order.

    Raises:
        FittedStepError: if a rank has not taken part; it names the rank in one line.
    """
    found = [None] * dist.get_world_size(group)
    started(group, lambda group: dist.all_gather_object(found, value, group=group))()
    return found


def started(group: Any, collective: Callable[..., Any], *tensors: Tensor, **options: Any) -> Callable[[], None]:
    """Start a collective of `torch.distributed`, the tensor with its result first.

    Returns:
        What waits until it has ended, and nothing but the caller holds its tensors.

    Raises:
        FittedStepError: here or there, if a rank has not taken part; it names the rank in one line.
    """
    before = [*map(_holders, tensors[:1])]
    given = [each.detach() for each in tensors]  # which nobody else has
    left = [ref(each) for each in given if each.device.type == "cpu"]
    with _named(group):
        work = collective(*given, group=group, **options)
    given.clear()

    def wait() -> None:
        nonlocal work
        if work is not None:
            with _named(group):
                work.wait()
        work = None
        # Gloo drops tensors and views of the result a moment after they are ready, and a plan frees some at once.
        until = monotonic() + _LINGERING
        while monotonic() < until and (
            any(each() is not None for each in left) or [*map(_holders, tensors[:1])] > before
        ):
            sleep(0)

    return wait


@contextmanager
def _named(group: Any) -> Iterator[None]:
    """Say which rank has not taken part where a collective fails."""
    try:
        yield
    except RuntimeError as error:
        missing = _GROUPS[group.group_name].missing(dist.get_process_group_ranks(group))
        raise FittedStepError(f"{missing}, and a sharded step needs all ranks") from error


def _holders(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return 0 if tensor.device.type != "cpu" else torch._C._storage_Use_Count(storage._cdata)


_Started = tuple[Tensor, Callable[[], None]]
_WAITS: dict[int, Callable[[], None]] = {}
"""What waits for each collective that was started and not waited for, by the storage of its result."""


def _all_gather(shard: Tensor, ranks: int, group: str) -> _Started:
    full = shard.new_empty((shard.shape[0] * ranks, *shard.shape[1:]))
    return full, started(_RESOLVE(group), _GATHER, full, shard.contiguous(), async_op=True)


def _reduce_scatter(full: Tensor, ranks: int, group: str) -> _Started:
    shard = full.new_empty((full.shape[0] // ranks, *full.shape[1:]))
    return shard, started(_RESOLVE(group), _SCATTER, shard, full.contiguous(), op=dist.ReduceOp.AVG, async_op=True)


def _all_reduce(tensor: Tensor, ranks: int, group: str) -> _Started:
    mean = tensor.clone(memory_format=torch.contiguous_format)
    return mean, started(_RESOLVE(group), dist.all_reduce, mean, op=dist.ReduceOp.AVG, async_op=True)


def _now(start: Callable[..., _Started], *args: Any) -> Tensor:
    result, wait = start(*args)
    wait()
    return result


def _later(start: Callable[..., _Started], *args: Any) -> Tensor:
    result, wait = start(*args)
    _WAITS[result.untyped_storage()._cdata] = wait
    return result


def _define() -> None:
    forms: dict[str, tuple[Callable[..., _Started], Callable[..., Tensor]]] = {
        "all_gather": (_all_gather, lambda x, ranks, group: x.new_empty((x.shape[0] * ranks, *x.shape[1:]))),
        "reduce_scatter": (_reduce_scatter, lambda x, ranks, group: x.new_empty((x.shape[0] // ranks, *x.shape[1:]))),
        "all_reduce": (_all_reduce, lambda x, ranks, group: x.new_empty(x.shape)),
    }
    for name, (function, fake) in forms.items():
        for prefix, run in (("", _now), ("start_", _later)):
            _LIBRARY.define(f"{prefix}{name}(Tensor x, int ranks, str group) -> Tensor")
            _LIBRARY.impl(f"{prefix}{name}", partial(run, function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{RANKS}::{name}", fake, lib=_LIBRARY)
    _LIBRARY.define("wait(Tensor(a!) x) -> ()")
    _LIBRARY.impl("wait", lambda x: _WAITS.pop(x.untyped_storage()._cdata)(), "CompositeExplicitAutograd")


_define()
_OPERATORS: Any = getattr(torch.ops, RANKS)
ALL_GATHER, REDUCE_SCATTER = _OPERATORS.all_gather.default, _OPERATORS.reduce_scatter.default
ALL_REDUCE = _OPERATORS.all_reduce.default
COLLECTIVES = frozenset({ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE})
