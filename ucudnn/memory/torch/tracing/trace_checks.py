"""What a trace of a step can hold; each refusal says what to do instead."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from logging import LogRecord, getLogger
from math import prod
from threading import Thread
from traceback import walk_tb

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from ucudnn.errors import StepGraphError
from ucudnn.memory.step.graph import Phase
from ucudnn.memory.torch.subject.traced_values import Trace, TracedCall, TracedTensor, generator_id, is_written
from ucudnn.memory.torch.tracing.provenance import short_line, told
from ucudnn.memory.torch.tracing.tracer import Tracer
from ucudnn.units import shortened

_INSTEAD = dict.fromkeys(("nonzero", "index", "masked_select"), "use torch.where or weights")
_OF_FAKES = "FakeTensor", "fake_mode", "'meta' device", "is not allocated", "OpaqueTensorImpl", "_share_fd_"
_BACKWARD_OF_ATTENTION = {
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
}  # they repeat the random numbers of forward by a seed that they are given


@contextmanager
def explained(tracer: Tracer) -> Iterator[None]:
    """Say what to do where PyTorch cannot run a step on tensors without memory.

    Raises:
        StepGraphError: in the place of PyTorch's error.
    """
    try:
        yield
    except DataDependentOutputException as error:
        raise StepGraphError(
            f"{told(tracer.place)} reads the value of a tensor that may change from step to step, and so may what"
            " follows: a plan cannot hold it; compute with the tensor, or return it and read it in the loop"
        ) from error
    except DynamicOutputShapeException as error:
        raise StepGraphError(
            f"{told(tracer.place)}: the shape of what {error.func} returns depends on values that may change from step"
            f" to step: a plan cannot hold it; {_INSTEAD.get(error.func._opname, 'leave it to the loop')}"
        ) from error
    except UnsupportedOperatorException as error:
        raise StepGraphError(
            f"{told(tracer.place)} calls {error.func}, which PyTorch runs neither on tensors without memory nor on"
            " zeros: leave it to the loop"
        ) from error
    except (RuntimeError, AssertionError) as error:
        reason = str(error)
        if "use_reentrant=True" in reason:
            raise StepGraphError(
                "the step calls torch.utils.checkpoint(use_reentrant=True), whose backward begins another one, and a"
                " trace sees one only: give it use_reentrant=False, or fit the model without it; plans recompute on"
                " their own"
            ) from error
        if any(words in reason for words in _OF_FAKES):
            calls = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
            raise StepGraphError(
                f"{told((tracer.place[0], short_line(reversed(calls))))} does what PyTorch cannot do with tensors"
                f" without memory ({shortened(reason.splitlines()[0])}): leave it to the loop"
            ) from error
        raise


@cache
def start_autograd() -> None:
    """Let autograd start its threads before there are tensors without memory: one for each device that exists.

    Where there is no GPU, `FakeTensorMode` lets PyTorch with CUDA take it for granted that there is one. If the first
    backward of the process came after that, autograd would start threads for GPUs, and no process that is forked
    later could compute a gradient. A thread of its own has none of the caller's modes.
    """
    thread = Thread(target=lambda: torch.ones((), requires_grad=True).backward())
    thread.start()
    thread.join()


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keep PyTorch from telling of tensors without memory what a user could not mend.

    It warns where a model looks at their addresses, which are all zero, as `nn.LSTM` on a GPU does with its weights. It
    logs the traceback of an operator that fails on them, twenty lines above the one that says what a model does not
    take. What it logs for debugging stays.
    """

    def is_told(entry: LogRecord) -> bool:
        return not entry.exc_info

    logger = getLogger(fake_tensor.__name__)
    logger.addFilter(is_told)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor is deprecated")
            yield
    finally:
        logger.removeFilter(is_told)


def check_generators(trace: Trace, known: Iterable[torch.Generator]) -> None:
    """Check that operators draw from generators that are there before the step.

    Raises:
        StepGraphError: if one draws from another generator, which the code of a plan would go on with in each step.
    """
    own = {generator_id(each) for each in (torch.default_generator, *torch.cuda.default_generators, *known)}
    for call in trace.calls:
        if any(isinstance(each, torch.Generator) and generator_id(each) not in own for each in call.kwargs.values()):
            raise StepGraphError(
                f"{told((call.module, call.source))} draws from a generator that forward makes, or that is no attribute"
                " of a module, no argument and no global variable: make it before the fit, as self.generator"
            )


def check_calls(trace: Trace) -> None:
    """Check that the same calls in each step do what the program does.

    Raises:
        StepGraphError: if an operator has a buffer of unknown size, random numbers are drawn once more in backward, or
            a view is read after the tensor that it views was turned in place, or a tensor gets more elements or fewer,
            or a storage.
    """
    for call in trace.calls:  # first, because PyTorch makes a tensor of the weights' storage before such a call
        if call.func._opname == "_cudnn_rnn":
            raise StepGraphError(
                f"{call.module or 'the step'} calls _cudnn_rnn, which keeps a buffer for backward whose size is not"
                " known before it runs: call fit and the step within torch.backends.cudnn.flags(enabled=False)"
            )
    _check_turned(trace)
    for call in trace.calls:
        _check_elements(call)
        if call.draws and call.phase is Phase.BACKWARD and call.func._opname not in _BACKWARD_OF_ATTENTION:
            raise StepGraphError(
                f"{call.module or 'the step'} draws random numbers in backward ({call.func}), as torch.utils.checkpoint"
                " does to repeat those of forward, which a plan cannot: fit the model without it; plans recompute on"
                " their own"
            )


def _check_elements(call: TracedCall) -> None:
    """Check that a call leaves the tensors that it writes with as many elements as they had, in memory that is known.

    A plan knows one size of a storage, from its first tensor on; the trace tells its last one.
    """
    if "Storage" in call.func._overloadname:  # of set_: the storages of a trace have no memory
        raise StepGraphError(
            f"{call.module or 'the step'} gives a tensor the storage of another one ({call.func}), and a plan knows"
            " tensors, not their storages: take a view of the other tensor, as with torch.as_strided"
        )
    for argument in call.func._schema.arguments:
        if not is_written(argument):
            continue
        given = call.argument(argument.name)
        for result in call.outputs if isinstance(given, TracedTensor) else ():
            if result.storage == given.storage and prod(result.shape) != prod(given.shape):
                raise StepGraphError(
                    f"{call.module or 'the step'} changes the size of a tensor from {list(given.shape)} to"
                    f" {list(result.shape)} ({call.func}), and a plan knows one size of its memory: make the tensor in"
                    " its last shape, as with torch.empty, or take a view of it"
                )


def _check_turned(trace: Trace) -> None:
    """Check that no view is read after the tensor that it views was turned in place.

    Autograd gets the gradient of such a view right on real tensors. On tensors without memory it makes the view again,
    of the turned tensor, and the gradient is wrong, or has another shape.
    """
    for turned in trace.turned:
        storage = turned.inputs[0].storage
        before, behind = trace.calls[: turned.index], trace.calls[turned.index + 1 :]
        views = {
            each.geometry
            for call in before
            if call.func.is_view and call.func is not torch.ops.aten.detach.default
            for each in call.outputs
            if each.storage == storage
        }
        views.discard(turned.outputs[0].geometry)
        for call in behind:
            if call.phase is Phase.FORWARD and any(
                each.storage == storage and each.geometry in views for each in call.inputs
            ):
                raise StepGraphError(
                    f"{turned.module or 'the step'} changes how a tensor lies in memory ({turned.func}) of which there"
                    f" is a view that {call.func} reads later; the trace would get the gradient of the view wrong: use"
                    f" {turned.func._opname.removesuffix('_')}, which makes another view"
                )
