"""Runs a candidate of one call, times it, and compares its output with that of PyTorch's own kernel."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch

from ucudnn.torch.calls.candidate_kernel import TunedKernel
from ucudnn.torch.calls.output_form import OutputForm
from ucudnn.torch.trials.call_site import CallSite
from ucudnn.torch.trials.candidate import NO_MEMORY, Candidate, Trial
from ucudnn.torch.trials.output_sketch import distance_of, sketch, sketch_sizes
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

    def beside(self, kernel: TunedKernel, candidate: Candidate, expected: torch.Tensor) -> bool:
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

    def in_turn(self, kernel: TunedKernel, trial: Trial) -> Callable[[torch.Tensor], None] | None:
        """Run a candidate before PyTorch's own kernel, in memory that this gets next, and keep a sketch of its output.

        Return what compares PyTorch's output with the sketch; None if no memory is free, or the candidate failed.
        """
        program, candidate = self.tuner.program, trial.candidate
        assert candidate is not None
        wanted = self.form.size_bytes, kernel.workspace_bytes, *sketch_sizes(self.form)
        if not self.tuner.watch.holds(wanted, program.live_bytes()) or not self.has_free_blocks(wanted, False):
            self.site.missed(candidate)
            return None
        out, trial.started = self.form.new(), True
        marks = self._run(kernel, candidate, out)
        if marks is None:
            return None
        found = program.host_copy(sketch(self.finished(out)))  # so that nothing of it is live at PyTorch's peak

        def compare(expected: torch.Tensor) -> None:
            if expected.is_contiguous(memory_format=self.form.memory_format):
                distance = partial(distance_of, found, program.host_copy(sketch(expected)))
                self.tuner.measured(self.site, candidate, *marks, distance)
            else:
                candidate.reject(NO_MEMORY)

        return compare

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
