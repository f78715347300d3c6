"""The interceptor that tunes: PyTorch's own kernels, or heuristic plans, run until others were found to be faster."""

import atexit
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ucudnn.backends.fork_locks import LockLevel, new_lock
from ucudnn.handle import Handle
from ucudnn.torch.calls.aten_kernels import AtenKernels, Gradients
from ucudnn.torch.calls.call_cache import Flags, all_deterministic, cudnn_deterministic, cudnn_enabled, precision_of
from ucudnn.torch.calls.fallbacks import Fallbacks
from ucudnn.torch.calls.interceptor import Interceptor
from ucudnn.torch.calls.layer_owners import LayerNames
from ucudnn.torch.calls.problem import Geometry
from ucudnn.torch.device.gpu import capturing
from ucudnn.torch.gate.gate_library import GateLibrary
from ucudnn.torch.steps.phase import TuningPhase
from ucudnn.torch.steps.step_tracker import StepTracker
from ucudnn.torch.tuning.router import Router
from ucudnn.torch.tuning.tuned_call import CallTable, Shapes, TunedCall, backward_of, forward_of
from ucudnn.torch.tuning.tuner import Tuner

_JOIN_SECONDS = 5.0

_graph_task: Callable[[], int] = torch._C._current_graph_task_id


@final
class AutoInterceptor:
    """Tunes a program while it runs; until then, and where nothing is gained, PyTorch or a heuristic plan computes.

    Args:
        open_tuner: opens the tuner of a GPU, given its number; of the CPU, given -1.
        device_type: 'cuda' or 'cpu'.
        aten: PyTorch's own kernels.
        changed: called between steps when calls are to go elsewhere; see `operators` and `router`.
        library: builds the gate, through which calls that are passed on do not come to Python; None goes without.
        planned: computes by heuristic plans, as the gate does while others are tried and by adopted ones once all is
            settled; None if PyTorch's own kernels run.
    """

    def __init__(
        self,
        open_tuner: Callable[[int], Tuner],
        device_type: str,
        aten: AtenKernels,
        changed: Callable[[], None],
        library: GateLibrary | None = None,
        planned: Interceptor | None = None,
    ) -> None:
        self.device_type = device_type
        self.aten = aten
        self.planned = planned
        self.names = LayerNames() if planned is None else planned.names
        self.fallbacks = Fallbacks() if planned is None else planned.fallbacks
        self._open_tuner = open_tuner
        self._lock = new_lock(LockLevel.FACE)
        self._tuners: dict[int, Tuner] = {}
        self._tracker = StepTracker()
        self._forward_calls, self._backward_calls = CallTable(), CallTable()
        calls = self._forward_calls, self._backward_calls
        self.router = Router(library, planned, self._tracker, calls, self._tuners, changed)
        self._threads: set[int] = set()
        self._quiet = False
        self._by_optimizer = False
        self._pass_forward: Callable[..., torch.Tensor] = aten.forward if planned is None else planned.forward
        self._pass_backward: Callable[..., Gradients] = aten.backward if planned is None else planned.backward
        self._hook: Any = None
        self._stop = partial(_stop, self._tuners)

    def begin(self) -> None:
        """Begin to follow the program's optimizers."""
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(self._optimizer_stepped)
            atexit.register(self._stop)
            for tuner in self._tuners.values():
                tuner.resume()

    def end(self) -> None:
        """Follow the program no longer, and end all work in the background."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self.router.end()
            atexit.unregister(self._stop)
            self._stop()

    def operators(self) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
        """Return what computes forward and backward; None where PyTorch's own operator can stay in its place."""
        idle = (None, None) if self.planned is None else self.planned.operators()
        routes = self.router.routes
        return self.forward if routes.forward else idle[0], self.backward if routes.backward else idle[1]

    def use_gate(self) -> bool:
        """Let the gate use the table that is wanted; see `Router.use_gate`."""
        return self.router.use_gate(self.device_type, (self.forward, self.backward), self._first_is_called)

    def _first_is_called(self) -> None:
        """End a step where the first kernel that the gate knows is called again, and no optimizer steps."""
        if not self._tracker.by_optimizer and _graph_task() == -1:
            self._step_ended_in_call()

    def handles(self) -> dict[torch.device, Handle]:
        """Return the handles of heuristic plans, by device; none if PyTorch's own kernels run."""
        return {} if self.planned is None else self.planned.handles()

    def tuners(self) -> dict[torch.device, Tuner]:
        """Return the tuner of each device."""
        with self._lock:
            tuners = dict(self._tuners)
        return {torch.device("cpu") if at < 0 else torch.device("cuda", at): each for at, each in tuners.items()}

    def forward(self, *call: Any) -> torch.Tensor:
        """Return what aten::_convolution returns, given its arguments."""
        x, weight = call[0], call[1]
        busy = self._forward_calls.busy
        passes = busy is not None and (x.shape, weight.shape) not in busy
        if passes and not self._tracker.is_silent():  # most calls, which so cost the least
            return self._pass_forward(*call)
        bias, stride, padding, dilation, transposed, output_padding, groups, _, *flags = call[2:]
        geometry = (tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
        ordinal = x.get_device()
        key = (
            x.shape, x.stride(), x.dtype, ordinal, weight.shape, weight.stride(), weight.dtype, weight.get_device(),
            None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.get_device()),
            geometry, *flags,
        )  # fmt: skip
        tuned = self._forward_calls.calls.get(key)
        if tuned is None:
            deterministic, enabled, tf32 = flags
            stated = Flags(tf32, deterministic, enabled)
            tuned = forward_of(self._tuner(ordinal), x, weight, bias, Geometry(*geometry), stated)
            self._keep(self._forward_calls, key, tuned, (x.shape, weight.shape))
        if self._tracker.is_candidate(tuned):
            self._threads.add(get_ident())
            if self._tracker.begins(tuned, in_backward=_graph_task() != -1):
                self._step_ended_in_call()
        path = tuned.path
        if path is None:
            return self._pass_forward(*call)
        if tuned.copied is not None:  # before anything is timed, and also where the heuristic plan computes then
            x, weight = x.contiguous(memory_format=tuned.copied), weight.contiguous(memory_format=tuned.copied)
        return path.forward(x, weight, bias, partial(self._pass_forward, x, weight, *call[2:]))

    def backward(self, *call: Any) -> Gradients:
        """Return what aten::convolution_backward returns, given its arguments."""
        x, weight = call[1], call[2]
        busy = self._backward_calls.busy
        if busy is not None and (x.shape, weight.shape) not in busy:
            return self._pass_backward(*call)
        grad, stride, padding, dilation, transposed, output_padding, groups, output_mask = call[0], *call[4:]
        geometry = (tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
        ordinal = x.get_device()
        deterministic = cudnn_deterministic() or all_deterministic()
        enabled, precision = cudnn_enabled(), precision_of("cuda", "conv")
        key = (
            grad.shape, grad.stride(), grad.dtype, grad.get_device(), x.shape, x.stride(), x.dtype, ordinal,
            weight.shape, weight.stride(), weight.dtype, weight.get_device(),
            geometry, tuple(output_mask), deterministic, enabled, precision,
        )  # fmt: skip
        tuned = self._backward_calls.calls.get(key)
        if tuned is None:
            flags = Flags(precision == "tf32", deterministic, enabled)
            tuned = backward_of(self._tuner(ordinal), grad, x, weight, Geometry(*geometry), output_mask, flags)
            self._keep(self._backward_calls, key, tuned, (x.shape, weight.shape))
        path = tuned.path
        if path is None:
            return self._pass_backward(*call)
        if tuned.copied is not None:
            grad, x, weight = (each.contiguous(memory_format=tuned.copied) for each in (grad, x, weight))
        mask = () if self.planned is None else (output_mask,)
        baseline = partial(self._pass_backward, grad, x, weight, *call[3:10], *mask)
        return path.backward(grad, x, weight, output_mask, baseline)

    def _keep(self, calls: CallTable, key: tuple[Any, ...], call: TunedCall, shapes: Shapes) -> None:
        calls.calls[key], call.shapes = call, shapes
        call.begin_step()  # it begins in the step that runs, because shapes may be new
        if call.reason and self.planned is None:  # a heuristic plan may compute it all the same
            self.fallbacks.add(call.reason)

    def _tuner(self, ordinal: int) -> Tuner:
        tuner = self._tuners.get(ordinal)
        if tuner is None:
            with self._lock:
                tuner = self._tuners.get(ordinal) or self._open_tuner(ordinal)
                tuner.awaits, tuner.gated = self.router.awaits_gate, self.router.gates_now
                if self._by_optimizer:  # it has stepped before the first convolution on the device
                    tuner.begin_anew(trains=True)
                self._tuners[ordinal] = tuner
        return tuner

    def _optimizer_stepped(self, optimizer: object, *_: object) -> None:
        if _graph_task() != -1:  # gradients are used as soon as they are there, in the midst of a step
            return
        if self._tracker.optimizer_stepped(optimizer):
            self.router.update(may_differ=self._step_ended())

    def _step_ended_in_call(self) -> None:
        """End a step while a convolution is computed; others are registered later if only this thread computes any."""
        self._step_ended()
        if len(self._threads) <= 1:
            self.router.update_later()

    def _step_ended(self) -> bool:
        """End a step, and return whether other operators may be wanted by now."""
        if self._tuners and capturing():  # CUDA refuses to read marks in a capture, and marks that were made in one
            return False
        others, self._by_optimizer = self._by_optimizer is not self._tracker.by_optimizer, self._tracker.by_optimizer
        if self.router.is_settled and not others and all(tuner.keeps_peak() for tuner in self._tuners.values()):
            return False
        forward, backward = self._forward_calls, self._backward_calls
        for tuner in list(self._tuners.values()):
            tuner.step_ended(len(forward.calls) + len(backward.calls))
            if others:
                tuner.begin_anew(trains=self._by_optimizer)
        quiet = all(tuner.is_quiet for tuner in self._tuners.values())
        if not (quiet and self._quiet):  # in most steps nothing is tried, and the host has other work
            forward.begin_step()
            backward.begin_step()
        self._quiet = quiet
        phases = {each.phase for each in self._tuners.values()}
        self.router.step_ended(phases)
        if self.router.is_settled and self._by_optimizer:
            self._tracker.trust_optimizers()
        # All calls count while a first convolution is still to come, or all are timed.
        all_count = not phases or TuningPhase.WATCHING in phases
        if all_count or not (self._tracker.by_optimizer or self.router.is_settled):
            forward.busy = backward.busy = None
        else:
            first = None if self._tracker.by_optimizer else self._tracker.first
            forward.look_at(*([first.shapes] if isinstance(first, TunedCall) else []))
            backward.look_at()
        return True


def _stop(tuners: dict[int, Tuner]) -> None:
    """End all work in the background; a process that exits meanwhile could end inside cuDNN."""
    for tuner in tuners.values():
        tuner.pause()
    for tuner in tuners.values():
        tuner.source.join(_JOIN_SECONDS)
