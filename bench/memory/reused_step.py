"""ReusedStep: one training step that several trials train, one after another."""

import gc
from collections.abc import Iterator
from typing import final

import torch

from ucudnn.memory.torch.comparison.trial import numbered_device, trial_step
from ucudnn.memory.torch.comparison.trial_result import TrialSettings


@final
class ReusedStep:
    """A step that several trials train, one after another.

    Attributes:
        step: the step.
        device: where it runs.

    Args:
        settings: of the trials, of which the recipe and the device count.
    """

    def __init__(self, settings: TrialSettings) -> None:
        self.step = trial_step(settings)
        self.device = numbered_device(settings.device)
        on_gpu = self.device.type == "cuda"
        self._random = torch.get_rng_state(), torch.cuda.get_rng_state(self.device) if on_gpu else None
        self._first = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._held()}

    def begin_anew(self) -> None:
        """Bring back the first tensors and random numbers, and give PyTorch's allocator back its room.

        The optimizer's state is forgotten.
        """
        with torch.no_grad():
            for name, tensor in self._held():
                tensor.copy_(self._first[name])
        cpu, gpu = self._random
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, self.device)
        self.step.clear()
        if self.step.optimizer is not None:
            self.step.optimizer.state.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)
            torch.cuda.empty_cache()

    def _held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield parameters and buffers with their names, also buffers that are in no saved state."""
        yield from self.step.model.named_parameters()
        yield from self.step.model.named_buffers()
