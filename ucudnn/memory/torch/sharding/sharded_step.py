"""ShardedStep: a fitted step whose parameters, gradients and optimizer state are divided among ranks."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointError

from ucudnn.errors import InvalidValueError, StepGraphError
from ucudnn.memory.plans.plan import MemoryPlan
from ucudnn.memory.reports.plan_summary import sharded_lines
from ucudnn.memory.step.graph import Phase
from ucudnn.memory.torch.device.weak_hook import weakly
from ucudnn.memory.torch.sharding.agreement import Agreement, collectives_of, measured_link, slowest
from ucudnn.memory.torch.sharding.collectives import (
    ALL_GATHER,
    COLLECTIVES,
    PATIENCE,
    SILENCE,
    RollCall,
    exchanged,
    group_of,
    numbers,
)
from ucudnn.memory.torch.sharding.gathered_model import GatheredModel
from ucudnn.memory.torch.sharding.shards import earlier_parameters, placed_inside, shard_parameters, unshard
from ucudnn.memory.torch.subject.model_checks import check_model
from ucudnn.memory.torch.subject.step_program import StepProgram
from ucudnn.memory.torch.subject.update_parts import optimizer_of, update_in_parts
from ucudnn.units import format_bytes, shortened

_UNPLANNED = 1 << 62
"""Stands for the collectives of a step that no rank has planned yet."""
_INSTEAD_OF_CHECKPOINTS = (
    "parameters are gathered in the model's forward and in the loss alone, and torch.utils.checkpoint reads them in"
    " backward once more: fit the model without it; plans recompute on their own"
)


@final
class Sharding:
    """Divides a model and its optimizers among the ranks of a device mesh's first dimension.

    Attributes:
        model: what `fit` trains in the place of the model.
        accumulating: likewise, where whole gradients are accumulated.
        optimizers: what it is given in the place of the optimizers.

    Raises:
        InvalidValueError: if the mesh or the model is not one that can be sharded.
    """

    def __init__(self, model: nn.Module, loss: Any, optimizer: Any, mesh: Any, precision: Any = None) -> None:
        if not dist.is_available() or not isinstance(mesh, DeviceMesh):
            raise InvalidValueError(
                f"mesh={shortened(mesh)} is no DeviceMesh: make one by torch.distributed.init_device_mesh"
            )
        if mesh.ndim > 1:
            if mesh.mesh_dim_names is None:
                raise InvalidValueError("the mesh has several dimensions without names: give mesh_dim_names=")
            mesh = mesh[mesh.mesh_dim_names[0]]
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise InvalidValueError("the model is a DistributedDataParallel: give fit(..., mesh=) the model in it")
        check_model(model, sharded=True)
        precision = MixedPrecisionPolicy() if precision is None else precision
        if not isinstance(precision, MixedPrecisionPolicy) or torch.float16 in (
            precision.param_dtype,
            precision.reduce_dtype,
        ):
            raise InvalidValueError(
                f"mixed_precision={shortened(precision)} is no MixedPrecisionPolicy of torch.distributed.fsdp, or one"
                " of float16, in which sums over ranks overflow: take bfloat16 or float32"
            )
        self._dtype = precision.param_dtype
        given: Sequence[torch.optim.Optimizer]
        given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [*(optimizer or ())]
        own = {id(each): each for each in model.parameters()}
        for each in given:
            optimizer_of(each, own)  # which refuses parameters that are none of the model's
        self.roll = RollCall()
        exchange = partial(exchanged, group_of(mesh, PATIENCE, self.roll, "gloo"))
        exchange(None)  # when all ranks are here, groups with a short timeout connect within it
        self.group = group_of(mesh, SILENCE, self.roll)
        self.exchange = partial(numbers, group_of(mesh, SILENCE, self.roll, "gloo"))
        self._model, self._given, self._earlier = model, given, earlier_parameters(model)
        self.shards = shard_parameters(model, given, mesh)
        gather = partial(ALL_GATHER, ranks=mesh.size(), group=self.group.group_name)
        device = self.shards[0].inside.device if self.shards else torch.device("cpu")
        link = measured_link(gather, mesh.size(), device)
        self.ranks = Agreement(exchange, mesh.get_local_rank(), slowest(exchange(link)))
        named = type(type(model).__name__, (GatheredModel,), {})  # reports name the step by its class
        gathered = partial(named, model, self.shards, self.group, precision)
        self.model: GatheredModel = gathered()
        self.accumulating: GatheredModel = gathered(accumulates=True)
        self._loss = loss
        inside = {id(each.outside): each.inside for each in self.shards}
        self.optimizers = [optimizer_of(each, inside)[0] for each in given]

    def fitted(self, make: Callable[..., Any], sample: Any, *, keep_gradients: bool) -> "ShardedStep":
        """Return the step that a function fits to a sample, and to what stands in the place of model and optimizers.

        It is called with a sample, whether gradients are kept, the ranks, the model, the loss and optimizers. Where all
        ranks refuse, model and optimizers are as they were.
        """

        def made(sample: Any, *, accumulates: bool = False) -> Any:
            model = self.accumulating if accumulates else self.model
            given = (model, model.reading(self._loss), () if accumulates else self.optimizers)
            try:
                step = make(sample, keep_gradients or accumulates, self.ranks, *given)
            except CheckpointError as error:
                raise StepGraphError(f"the step calls torch.utils.checkpoint: {_INSTEAD_OF_CHECKPOINTS}") from error
            self.ranks.all(partial(self._check, step.program))
            self.ranks.check_same(step.code, "code")
            return step

        try:
            with placed_inside(self.shards):
                step = made(sample)
        except Exception as error:
            if self.ranks.refuse(error):
                unshard(self.shards, self._earlier, self._given)
            raise
        self._earlier.clear()
        # Where the update is planned in parts, the optimizer of the loop updates in parts, too.
        pairs = zip(self._given, self.optimizers, strict=True)
        ends = [update_in_parts(given) for given, planned in pairs if "step" in vars(planned)]
        return ShardedStep(self._model, self, step, partial(made, accumulates=True), ends)

    def _check(self, program: StepProgram) -> None:
        """Check that ranks compute alike, and that nothing but collectives reads parts of parameters.

        Raises:
            StepGraphError: if something else does: it would compute with some rows as if they were all.
        """
        for _, place, is_branch in program.supposed:
            if is_branch:
                raise StepGraphError(
                    f"{place} goes one of two ways by the values of a tensor, which may differ between ranks, and all"
                    " must run the same collectives: compute both, and choose by torch.where"
                )
        split = {id(each.inside): each.name for each in self.shards if each.is_split}
        storages = {traced.storage: split[id(real)] for real, traced in program.persistent if id(real) in split}
        for call in program.every_call():
            casts = call.func is torch.ops.aten._to_copy.default and call.kwargs.get("dtype") is self._dtype
            if call.phase is Phase.OPTIMIZER or call.func in COLLECTIVES or (casts and self._dtype is not None):
                continue
            if call.func is torch.ops.aten.cat.default and all(each.storage in storages for each in call.inputs):
                continue  # they are gathered together
            for name in (storages[each.storage] for each in call.inputs if each.storage in storages):
                raise StepGraphError(
                    f"{call.module or 'the step'} reads {name} where it is not gathered ({call.func}):"
                    f" {_INSTEAD_OF_CHECKPOINTS}"
                )


@final
class ShardedStep(nn.Module):
    """A model whose training follows a plan, with parameters divided among ranks; all ranks call it together.

    It has the attributes of `FittedStep`, too. `backward` leaves each rank its rows of the mean of all gradients, as
    FSDP2 does. In evaluation mode and without gradients it gathers parameters and runs the model as it is.

    Attributes:
        model: the model, whose parameters are DTensors; torch.distributed.checkpoint saves and loads its `state_dict`.
    """

    def __init__(
        self,
        model: nn.Module,
        sharding: Sharding,
        step: Any,
        accumulating: Callable[[Any], Any],
        ends: Sequence[Callable[[], object]] = (),
    ) -> None:
        super().__init__()
        self.model, self._ends, self._accumulating = model, [*ends], accumulating
        self._averages = self._averages_now = True
        self._began = set[Any]()
        self._ending = False
        self._known: dict[tuple[Any, bool], tuple[MemoryPlan, int]] = {}
        self._steps = {False: step}  # by whether it accumulates; no submodules, because parameters are the model's
        object.__setattr__(self, "_step", step)
        object.__setattr__(self, "_sharding", sharding)
        for each in sharding.accumulating.accumulated:
            each.register_post_accumulate_grad_hook(weakly(self._note_gradient))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns, or the loss of it, as `FittedStep.forward` does, with the same errors."""
        sharding, step = self._sharding, self._step
        sharding.model.training = sharding.accumulating.training = self.model.training
        sharding.roll.begin_round()
        with placed_inside(sharding.shards):
            if self.model.training and torch.is_grad_enabled():
                step = self._agreed(args, kwargs)
            try:
                return step(*args, **kwargs)
            except Exception as error:
                sharding.roll.note_failure(error)
                raise

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Say whether backward of forwards from now on averages gradients, as that method of FSDP2 does.

        Without that each rank adds up its whole gradients. The next backward that averages has them in its mean.
        """
        self._averages = requires_gradient_sync

    def _note_gradient(self, whole: Tensor) -> None:
        if self._averages_now and not self._ending:
            self._ending = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._average)

    def _average(self) -> None:
        self._ending = False  # another forward may have come before this backward, and its own is still to come
        try:
            self._sharding.accumulating.reduce()
        except Exception as error:
            self._sharding.roll.note_failure(error)
            raise

    def _main(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the step of arguments like the sample; the first that accumulates is planned by all ranks together."""
        sharding, main = self._sharding, self._step
        self._averages_now, self._ending = self._averages, False
        # Gradients that are there are those that no rank has averaged.
        accumulates = not self._averages or any(each.grad is not None for each in sharding.accumulating.accumulated)
        if accumulates not in self._steps:
            begins = sharding.exchange(_UNPLANNED if main.step_of(args, kwargs) is main else -_UNPLANNED)
            if {*begins} != {_UNPLANNED}:
                raise InvalidValueError(
                    "in its first step without an average a sharded step takes arguments like the sample on all ranks,"
                    " and all leave the average out"
                )
            args, kwargs = main._arguments.arranged(args, kwargs)
            self._steps[True] = main.fitted_again(kwargs or args, refit=self._accumulating)
        return self._steps[accumulates]

    def _agreed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the step that runs, when all ranks run the same collectives; smaller arguments get their plan before.

        Raises:
            InvalidValueError: on all ranks, if one refuses its arguments, or would run other collectives.
        """
        sharding = self._sharding
        sharding.ranks.follows = None
        main = self._main(args, kwargs)
        ranks, found = sharding.ranks, main.step_of(args, kwargs)
        begins = sharding.exchange(self._signature(main, found))
        if main not in self._began and min(begins) <= 0:
            raise InvalidValueError("in its first step a sharded step takes arguments like the sample on all ranks")
        if 0 in begins:

            def plan_smaller() -> None:
                try:
                    ranks.follows = main.plan
                    main.other(args, kwargs)
                finally:
                    ranks.follows = None

            ranks.all(plan_smaller if found is None else list)
            found = main.step_of(args, kwargs)
            begins = sharding.exchange(self._signature(main, found))
        if others := [str(rank) for rank, each in enumerate(begins) if abs(each) != abs(begins[0])]:
            raise InvalidValueError(f"rank {' and '.join(others)}: other collectives than those of rank 0 would run")
        # A smaller step may be planned anew in backward, too, and no other rank knows of that.
        ranks.follows = None if found is main else main.plan
        self._began.add(main)
        return main

    def _signature(self, main: Any, step: Any) -> int:
        """Return a number of the collectives of a step; below 0 for a smaller one, and 0 where there is none yet."""
        if step is None:
            return 0
        plan, number = self._known.get((step, self._averages), (None, 0))
        if plan is not step.plan:
            number = collectives_of(step.plan, averages=self._averages)
            self._known[step, self._averages] = step.plan, number
        return number if step is main else -number

    def report(self) -> str:
        """Return what the plan does and takes, as `FittedStep.report` does, and what is gathered when."""
        step = self._step
        lines = [step.report(), *sharded_lines(step.plan, self._sharding.ranks.link, step.simulation)]
        if (other := self._steps.get(True)) is not None:
            peak = format_bytes(other.simulation.peak_bytes)
            lines.append(
                f"without an average: policy {other.plan.policy}, peak predicted {peak}, whole gradients included"
            )
        return "\n".join(lines)

    def close(self) -> None:
        """Give the host's memory back; the step cannot run its plan after that."""
        for each in self._steps.values():
            each.close()
        while self._ends:
            self._ends.pop()()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_step"], name)
