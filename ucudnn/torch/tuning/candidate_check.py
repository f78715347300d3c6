"""Runs a candidate of one call, times it, and compares its output with that of PyTorch's own kernel."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, final

import numpy as np
import torch

from ucudnn.torch.calls.candidate_kernel import TunedKernel
from ucudnn.torch.calls.problem import OutputForm
from ucudnn.torch.device.timed_device import relative
from ucudnn.torch.trials.call_site import CallSite
from ucudnn.torch.trials.candidate_list import NO_MEMORY, Candidate, Trial
from ucudnn.torch.tuning.tuner import Tuner

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""x, w, y and the bias."""

_SCALARS_BYTES = 8 << 10  # at least as much as the tensors take that compare two outputs


@final
class CandidateCheck(NamedTuple):
    """Checks a candidate at one call.

    Attributes:
        tuner: is told what was measured.
        site: what is known about the kernel.
        form: makes outputs.
        has_free_blocks: returns whether new tensors of some bytes take no new memory from the device, before PyTorch's
            output is computed, or after it.
        operands: returns x, w, y and the bias, given the output.
        finished: adds the bias to an output, unless the candidate has added it.
    """

    tuner: Tuner
    site: CallSite
    form: OutputForm
    has_free_blocks: Callable[[Sequence[int], bool], bool]
    operands: Callable[[torch.Tensor], Operands]
    finished: Callable[[torch.Tensor], torch.Tensor]

    def output(self, trial: Trial, baseline: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the output of PyTorch's own kernel, or of a candidate in its place, and measure what is tried."""
        candidate, kernel = trial.candidate, trial.kernel
        if candidate is None or kernel is None:
            return self._timed(baseline)
        if trial.in_place:
            found = self._in_place(kernel, candidate)
            trial.started |= found is None
            return baseline() if found is None else found
        if not candidate.in_turn:
            out = self._timed(baseline)
            trial.started = self._beside(kernel, candidate, out)
            return out
        trial.started, compare = self._in_turn(kernel, candidate)
        out = self._timed(baseline)
        if compare is not None:
            compare(out)
        return out

    def _timed(self, baseline: Callable[[], torch.Tensor]) -> torch.Tensor:
        begin = self.tuner.program.mark()
        out = baseline()
        self.tuner.measured(self.site, None, begin, self.tuner.program.mark())
        return out

    def _in_place(self, kernel: TunedKernel, candidate: Candidate) -> torch.Tensor | None:
        """Return the output that a candidate computes in place of PyTorch's own kernel; None if it does not."""
        if kernel.workspace_bytes and not self.has_free_blocks((self.form.size_bytes, kernel.workspace_bytes), False):
            candidate.reject(NO_MEMORY)
            return None
        begin = self.tuner.program.mark()
        out = computed(kernel, self.form, self.operands)
        if out is None:
            candidate.failed()
            return None
        out = self.finished(out)
        self.tuner.measured(self.site, candidate, begin, self.tuner.program.mark())
        return out

    def _beside(self, kernel: TunedKernel, candidate: Candidate, expected: torch.Tensor) -> bool:
        """Run a candidate after PyTorch's own kernel, and compare the outputs; return whether it was run.

        It is not run if no memory is free for another output.
        """
        program = self.tuner.program
        wanted = self.form.size_bytes, kernel.workspace_bytes
        fits = self.tuner.watch.holds(wanted, program.live_bytes())
        if not fits or not self.has_free_blocks((*wanted, _SCALARS_BYTES), True):
            self.site.missed(candidate)
            return False
        out = self.form.new()
        marks = self._run(kernel, candidate, out)
        if marks is not None:
            distance = program.distance(self.finished(out), expected)
            self.tuner.measured(self.site, candidate, *marks, distance)
        return True

    def _in_turn(self, kernel: TunedKernel, candidate: Candidate) -> tuple[bool, Callable[[torch.Tensor], None] | None]:
        """Run a candidate before PyTorch's own kernel, in memory that this gets next, and keep a sketch of its output.

        Return whether it was run, which it is not if no memory is free, and what compares PyTorch's output with the
        sketch; None if the candidate was not run, or failed.
        """
        program = self.tuner.program
        wanted = self.form.size_bytes, kernel.workspace_bytes, *sketch_sizes(self.form)
        if not self.tuner.watch.holds(wanted, program.live_bytes()) or not self.has_free_blocks(wanted, False):
            self.site.missed(candidate)
            return False, None
        out = self.form.new()
        marks = self._run(kernel, candidate, out)
        if marks is None:
            return True, None
        found = program.host_copy(sketch(self.finished(out)))  # so that nothing of it is live at PyTorch's peak

        def compare(expected: torch.Tensor) -> None:
            if expected.is_contiguous(memory_format=self.form.memory_format):
                distance = partial(distance_of, found, program.host_copy(sketch(expected)))
                self.tuner.measured(self.site, candidate, *marks, distance)
            else:
                candidate.reject(NO_MEMORY)

        return True, compare

    def _run(self, kernel: TunedKernel, candidate: Candidate, out: torch.Tensor) -> tuple[Any, Any] | None:
        """Compute an output that was poisoned, and return marks around that; None if it failed, which is noted."""
        program, operands = self.tuner.program, self.operands(out)
        out.fill_(float("nan"))
        program.poison(kernel.workspace_bytes)
        done = (self.site.is_long and not candidate.was_slow) or kernel.run(*operands)  # that may load code
        begin = program.mark()
        if done and kernel.run(*operands):
            return begin, program.mark()
        candidate.failed()
        return None


def computed(
    kernel: TunedKernel, form: OutputForm, operands: Callable[[torch.Tensor], Operands]
) -> torch.Tensor | None:
    """Return an output that a kernel has computed; None if it failed."""
    out = form.new()
    return out if kernel.run(*operands(out)) else None


_SUMMED, _AT_ONCE = 1 << 10, 1 << 21  # elements of one sum, and elements that are multiplied at a time


@cache
def _signs() -> torch.Tensor:
    """Return the signs; not at the import, because NumPy's random numbers take 15 ms to load."""
    return torch.from_numpy(np.random.default_rng(0).choice([-1.0, 1.0], _SUMMED))


def sketch(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sums of a tensor's blocks of 1024 elements with random signs.

    The squared length of the difference of two sketches is on average that of the difference of the tensors, because
    the signs are independent (Alon, Matias and Szegedy, 1996). For a million elements it is so within 10 %.

    Args:
        tensor: a tensor without gaps. Tensors are compared in the order of their memory.
    """
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    flat = tensor.as_strided((tensor.numel(),), (1,))
    signs = _signs().to(tensor.device, tensor.dtype, non_blocking=True)
    whole = len(flat) // _SUMMED * _SUMMED
    parts = flat[:whole].split(_AT_ONCE) if whole else ()
    sums = [torch.sum(part.view(-1, _SUMMED) * signs, 1, dtype=wide) for part in parts]
    rest = flat[whole:]
    return torch.cat([*sums, torch.sum(rest * signs[: len(rest)], 0, keepdim=True, dtype=wide)])


def distance_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the distance of two tensors on the host, relative to the length of the second one."""
    return relative(float(torch.dist(found.double(), expected.double())), float(expected.double().norm()))


def sketch_sizes(form: OutputForm) -> tuple[int, ...]:
    """Return the bytes of all tensors that live at a time while the sketches of two outputs are compared."""
    sums = (form.elements // _SUMMED + 1) * 8
    return min(form.elements, _AT_ONCE) * form.size_bytes // form.elements, _SUMMED * 8, sums, sums, sums, sums
