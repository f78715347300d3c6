"""The program of a training step: its operators as eager PyTorch calls them, one for each operation of a step graph.

The code of a plan calls the operators that autograd itself would call, in place where the model works in place, and in
backward where an operand is read by nobody else. That is why the numbers are the same to the bit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import TreeSpec, tree_flatten

from ucudnn.errors import FittedStepError, InvalidValueError
from ucudnn.memory.step.graph import StepGraph, StepOperation, Storage
from ucudnn.memory.torch.subject.call_modes import CallModes
from ucudnn.memory.torch.subject.model_checks import check_arguments, check_model
from ucudnn.memory.torch.subject.module_attributes import ModuleAttributes
from ucudnn.memory.torch.subject.output_tree import OutputTree
from ucudnn.memory.torch.subject.traced_values import TracedCall, TracedTensor

_KEPT, _BUCKETS = "gradients of earlier steps", "buckets of DistributedDataParallel"
_QUASI_NEWTON = "at most for LBFGS's history and line search"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepSubject:
    """What is trained.

    Attributes:
        args: its arguments; behind them the other arguments of the loss, as many as `targets` says.
        loss: returns the loss of the model's output and the targets; None where the caller computes it.
        targets: number of `args` that go to the loss alone.
        optimizers: the optimizers whose memory counts; they update one after the other.
        beside: bytes of what else is there during the whole step, by name.
        gradients_kept: whether gradients of earlier steps are among it.
        used: indices of the outputs that get a gradient, each with its strides, or None for those of the output; None
            where nobody has told yet.
        in_pieces: whether operators of backward may run piece by piece, and optimizers update some parameters at a
            time, which takes longer, to take less memory.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[..., Any] | None = None
    targets: int = 0
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    beside: Mapping[str, int] = field(default_factory=dict)
    gradients_kept: bool = False
    parallel: DistributedDataParallel | None = None
    used: frozenset[tuple[int, tuple[int, ...] | None]] | None = None
    in_pieces: bool = False

    @property
    def batch(self) -> int:
        """The first dimension of the first tensor of the sample, 1 if there is none."""
        sizes = [leaf.shape[0] for leaf in self.leaves()[0] if isinstance(leaf, Tensor) and leaf.dim()]
        return sizes[0] if sizes and sizes[0] else 1

    def without_sample(self) -> "StepSubject":
        """Return the same without arguments, whose memory would stay."""
        return replace(self, args=(), kwargs={})

    def leaves(self) -> tuple[list[Any], TreeSpec]:
        """Return all arguments as a flat list, and their structure."""
        return tree_flatten((self.args, dict(self.kwargs)))

    def touched(self) -> tuple[Any, ...]:
        """Return what a trace could change: a `Snapshot` begins at these."""
        return self.model, self.parallel, self.loss, self.optimizers, self.args, self.kwargs

    def called(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what a model, or the loss of it, returns."""
        if self.loss is None:
            return model(*args, **kwargs)
        own = len(args) - self.targets
        return self.loss(model(*args[:own], **kwargs), *args[own:])


def step_subject(
    model: nn.Module,
    sample: Any,
    loss: Callable[..., Tensor] | None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    *,
    keep_gradients: bool = False,
) -> StepSubject:
    """Return what is trained, from the arguments of `fit`.

    Raises:
        InvalidValueError: if there is a loss but nothing behind the model's arguments, or no plan can train the model.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    check_model(model)
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    if isinstance(sample, Mapping):
        kwargs = sample
    else:
        args = tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)
    if loss is not None and len(args) < 2:
        raise InvalidValueError("with a loss the sample is a tuple of the model's arguments and the loss's target")
    check_arguments(loss, optimizer, (args, kwargs))
    optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer or ())
    trained = (each for each in model.parameters() if each.requires_grad)  # as the allocator of a GPU rounds them
    size = sum(-(-each.nbytes // unit) * unit for each in trained for unit in [512 if each.is_cuda else 1])
    beside = {_KEPT: size} if keep_gradients else {}
    for each in optimizers:
        if isinstance(each, torch.optim.LBFGS):
            # It keeps two vectors for each entry of its history. It works on at most 12 more: the direction, the
            # gradient of now and of before, differences of them, and in a line search the parameters before it and the
            # gradients at its ends.
            (group,) = each.param_groups
            vectors = 2 * int(group["history_size"]) + 12
            vector = sum(int(parameter.nbytes) for parameter in group["params"])
            beside[_QUASI_NEWTON] = beside.get(_QUASI_NEWTON, 0) + vectors * vector
    parallel = model if isinstance(model, DistributedDataParallel) else None
    if parallel is not None:
        beside[_BUCKETS] = size
    return StepSubject(
        model=model if parallel is None else parallel.module,
        parallel=parallel,
        args=args,
        kwargs=kwargs,
        loss=loss,
        targets=0 if loss is None else 1,
        optimizers=optimizers,
        beside=beside,
        gradients_kept=keep_gradients,
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """A training step that can be run operation by operation.

    Tensors name their storage by a number: that of the graph, or a number behind the graph's where no plan counts the
    storage, because it is on another device.

    Attributes:
        uncounted: calls that are no operation, each with the number of operations before it.
        persistent: parameters, buffers and constants, each with the tensor that stands for it in the calls.
        outputs: the different tensors that the step returns, and behind them those of `supposed`.
        differentiable: indices of the outputs that backward may begin at.
        used: indices of those that get a gradient.
        grad_outputs: the gradient of each of these that backward begins with.
        outside: operations that stand for what the caller does between forward and backward, and their `grad_outputs`.
        sources: what gradients are computed of: (True, index in `persistent`) or (False, index in `inputs`).
        gradients: the gradient of each of the sources; None where the outputs do not depend on it.
        functions: by operation, what code calls in the place of the operator, with its arguments.
        groups: the sources in groups whose gradients backward hands over as soon as they exist, one group after the
            other; () hands over all of them when it has ended.
        order: the sources in the order in which the plain loop makes their gradients, those without a gradient first.
        values: indices in `persistent` of tensors whose values the trace has read, each with a copy.
        supposed: values of scalars that the trace has supposed, where, and whether another one is another step, because
            otherwise the plain loop raises an error.
        divided: which segments are computed part by part, and why, a line each.
        compiled: which runs of operations are compiled, and why others are not, a line each.
    """

    graph: StepGraph
    calls: tuple[TracedCall, ...]
    uncounted: tuple[tuple[int, TracedCall], ...]
    persistent: tuple[tuple[Tensor, TracedTensor], ...]
    inputs: tuple[TracedTensor, ...]
    outputs: tuple[TracedTensor, ...]
    result: OutputTree
    differentiable: tuple[int, ...]
    used: tuple[int, ...]
    grad_outputs: tuple[TracedTensor, ...]
    outside: Mapping[int, int]
    sources: tuple[tuple[bool, int], ...]
    gradients: tuple[TracedTensor | None, ...]
    device: torch.device
    sizes: Mapping[int, int]
    attributes: ModuleAttributes
    modes: CallModes
    functions: Mapping[int, Callable[..., Any]] = field(default_factory=dict)
    groups: tuple[tuple[int, ...], ...] = ()
    order: tuple[int, ...] = ()
    values: tuple[tuple[int, Tensor], ...] = ()
    supposed: tuple[tuple[bool, str, bool], ...] = ()
    divided: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()

    def every_call(self) -> Iterator[TracedCall]:
        """Yield the calls of operations, and those that are no operation."""
        yield from self.calls
        yield from (call for _, call in self.uncounted)

    def rewritten(
        self,
        operations: Iterable[StepOperation],
        calls: Iterable[TracedCall],
        kept: Iterable[int],
        new: Sequence[Storage],
        positions: Mapping[int, int] | Sequence[int],
    ) -> "StepProgram":
        """Return a program of other operations, of which some storages of the graph are kept, and some are new.

        Operations and calls have the numbers of this program's storages, and -1, -2 and so on of new ones. Positions
        are where each operation of this program, and their end, is now.
        """
        known = len(self.graph.storages)
        counted = [*kept, *range(-1, -1 - len(new), -1)]
        order = [*counted, *sorted(each for each in self.sizes if each >= known)]
        numbers = {storage: number for number, storage in enumerate(order) if storage != number}
        sizes = {**self.sizes, **{-number: each.size.at(self.graph.batch) for number, each in enumerate(new, 1)}}

        def numbered(tensor: TracedTensor) -> TracedTensor:
            return replace(tensor, storage=numbers.get(tensor.storage, tensor.storage))

        def ascending(storages: Iterable[int]) -> tuple[int, ...]:
            return tuple(sorted(numbers.get(each, each) for each in storages))

        graph = replace(
            self.graph,
            operations=tuple(
                replace(each, reads=ascending(each.reads), writes=ascending(each.writes)) for each in operations
            ),
            storages=tuple(new[-each - 1] if each < 0 else self.graph.storages[each] for each in counted),
        )
        return replace(
            self,
            graph=graph,
            calls=tuple(call.with_storages(numbers) for call in calls),
            uncounted=tuple((positions[at], call.with_storages(numbers)) for at, call in self.uncounted),
            persistent=tuple((real, numbered(each)) for real, each in self.persistent),
            inputs=tuple(map(numbered, self.inputs)),
            outputs=tuple(map(numbered, self.outputs)),
            grad_outputs=tuple(map(numbered, self.grad_outputs)),
            outside={positions[index]: grad_output for index, grad_output in self.outside.items()},
            functions={positions[index]: function for index, function in self.functions.items()},
            gradients=tuple(each and numbered(each) for each in self.gradients),
            sizes={numbers.get(each, each): sizes[each] for each in order if each in sizes},
        )

    def found_otherwise(self, outputs: Sequence[Tensor]) -> tuple[tuple[bool, str, bool], ...]:
        """Return what another step must suppose, by the outputs of forward; () where this one is right.

        Raises:
            FittedStepError: if something is otherwise, so that the plain loop raises an error.
        """
        first = len(outputs) - len(self.supposed)
        for index, (value, place, is_branch) in enumerate(self.supposed):
            if bool(outputs[first + index]) is value:
                continue
            if is_branch:
                return *self.supposed[:index], (not value, place, True)
            raise FittedStepError(
                f"{place} raises an error for these arguments, which a plan finds after forward: call step.model"
                " with them to see it"
            )
        return ()
