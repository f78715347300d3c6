"""Additive attention that recomputes its score beside the same layer of PyTorch's operators, which keeps its tanh.

    python -m bench.memory.attention                 # on a GPU: about a minute on an H200
    python -m bench.memory.attention --backend cpu   # tries the script out on small sizes

For 50, 100, 200 and 400 time steps (Meng et al., table 2b):

* the layer alone, with a hidden size of 1024: whether outputs and gradients are equal to the bit, the peak of a
  forward and backward pass beyond what is there before it, and its time;
* a translator of 3 + 3 LSTM layers of 1024 (TF-NMT), trained with SGD: the largest mini-batch whose peak of
  `torch.cuda.max_memory_allocated` is at most 12 GiB, beside the paper's, and the time of a step.
"""

import gc
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from bench.memory.attention_layers import ATTENTIONS
from bench.memory.translation_step import WIDTH, WORDS
from bench.memory.translator import Translator
from bench.tools.results import save
from bench.tools.script import add_backend, command_line, out_of, run_main
from bench.torch.measuring import conditions, device_of
from ucudnn.memory.torch.measuring.measured_peak import peak_bytes
from ucudnn.memory.torch.measuring.training_step import TrainingStep

GIB = 2**30
PAPER = {50: (350, 1100), 100: (90, 550), 200: (20, 230), 400: (2, 60)}
"""Largest mini-batches of TF-NMT on an M40 of 12 GB, without and with the memory-efficient layer."""


class Sizes(NamedTuple):
    """What is measured: hidden size, mini-batch of the layer alone, layers and words of the translator, its limit."""

    width: int
    batch: int
    layers: int
    words: int
    limit: int
    steps: tuple[int, ...]


FULL = Sizes(WIDTH, 16, 3, WORDS, 12 * GIB, tuple(PAPER))
SMALL = Sizes(16, 2, 1, 50, 1 << 19, (4, 16))


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def milliseconds(work: Callable[[], object], device: torch.device, runs: int = 5) -> float:
    """Return the median time of some work, after a run that does not count."""
    times = []
    for _ in range(runs + 1):
        synchronize(device)
        begin = perf_counter()
        work()
        synchronize(device)
        times.append((perf_counter() - begin) * 1e3)
    return median(times[1:])


def peak_of(step: TrainingStep, device: torch.device) -> int:
    """Return the peak of a step in bytes."""
    if device.type == "cpu":
        return peak_bytes(step)
    step.clear()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step.run()
    synchronize(device)
    return int(torch.cuda.max_memory_allocated())


def compare_layers(steps: int, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Return whether both layers alone give the same bits, and the peak and the time of both."""
    torch.manual_seed(0)
    query, memory = (torch.randn(sizes.batch, steps, sizes.width, device=device, requires_grad=True) for _ in "qm")
    weight = torch.randn_like(memory)
    found: dict[str, Any] = {"batch": sizes.batch, "width": sizes.width}
    results: list[list[torch.Tensor]] = []
    state: dict[str, torch.Tensor] = {}
    for name, kind in ATTENTIONS.items():
        layer: nn.Module = kind(sizes.width, sizes.width, sizes.width).to(device)
        layer.load_state_dict(state or layer.state_dict())
        state = layer.state_dict()
        results.append(outcome(layer, query, memory, weight))
        query.grad = memory.grad = None
        step = TrainingStep(model=layer, inputs=(query, memory), loss=weighted_sum, targets=(weight,))
        there = sum(each.numel() * each.element_size() for each in (query, memory, weight, *layer.parameters()))
        step.clear()
        before = there if device.type == "cpu" else torch.cuda.memory_allocated()
        found[name] = {"peak_bytes": peak_of(step, device) - before, "time_ms": milliseconds(step.run, device)}
        query.grad = memory.grad = None
    pairs = list(zip(*results, strict=True))
    found["equal"] = all(torch.equal(theirs, mine) for theirs, mine in pairs)
    found["largest_difference"] = max(float((theirs - mine).abs().max()) for theirs, mine in pairs)
    return found


def outcome(layer: nn.Module, query: torch.Tensor, memory: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """Return outputs and all gradients of a layer, on the host."""
    outputs = layer(query, memory)
    weighted_sum(outputs, weight).backward()
    gradients = [each.grad for each in (query, memory, *layer.parameters())]
    return [each.detach().cpu() for each in (*outputs, *gradients) if each is not None]


def weighted_sum(outputs: tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    """Return a loss that reads the context and the weights."""
    return (outputs[0] * weight).sum() + outputs[1].square().sum()


def loss_of(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return the loss over the sampled words."""
    return F.cross_entropy(logits, words)


class Trainer:
    """Trains a translator with one of the layers."""

    def __init__(self, name: str, steps: int, sizes: Sizes, device: torch.device) -> None:
        self.steps, self.sizes, self.device = steps, sizes, device
        made = Translator(ATTENTIONS[name], sizes.width, sizes.layers, sizes.words)
        self.model = made.to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, batch: int) -> TrainingStep:
        """Return a training step at a mini-batch."""
        words = self.sizes.words
        tokens = torch.randint(words, (batch, 2, self.steps), device=self.device)
        labels = torch.randint(self.model.head.out_features, (batch, self.steps), device=self.device)
        return TrainingStep(
            model=self.model, inputs=(tokens,), loss=loss_of, targets=(labels,), optimizer=self.optimizer
        )

    def peak(self, batch: int) -> int:
        """Return the peak of a step; more than the limit where the device's memory is too small."""
        try:
            return peak_of(self.step(batch), self.device)
        except torch.OutOfMemoryError:
            return self.sizes.limit + 1

    def largest(self) -> tuple[int, int]:
        """Return the largest mini-batch within the limit, and its peak; peaks tell where to look."""
        limit = self.sizes.limit
        self.peak(1)  # makes what libraries keep
        low, high = 0, 1
        peaks = {0: 0, 1: self.peak(1)}
        while peaks[high] <= limit:
            low, high = high, 2 * high
            peaks[high] = self.peak(high)
        while high - low > 1:
            share = (limit - peaks[low]) / max(1, peaks[high] - peaks[low])
            guess = min(max(low + round(share * (high - low)), low + 1), high - 1)
            for tried in {guess, min(guess + 1, high - 1)}:  # as a rule, the answer is between these two
                if low < tried < high:
                    peaks[tried] = self.peak(tried)
                    low, high = (tried, high) if peaks[tried] <= limit else (low, tried)
        return low, peaks[low]


def compare_translators(steps: int, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Return the largest mini-batch of both, and the times of a step at both mini-batches."""
    found: dict[str, Any] = {}
    for name in ATTENTIONS:
        trainer = Trainer(name, steps, sizes, device)
        batch, peak = trainer.largest()
        found[name] = {"batch": batch, "peak_bytes": peak}
        if batch:
            found[name]["time_ms"] = milliseconds(trainer.step(batch).run, device)
        shared = found["plain"]["batch"]
        if shared:
            found[name]["time_at_plain_batch_ms"] = milliseconds(trainer.step(shared).run, device)
        del trainer
        gc.collect()
    return found


def show(steps: int, case: dict[str, Any]) -> None:
    """Print one row for the layer and one for the translator."""
    layer, translator = case["layer"], case["translator"]
    bits = "equal to the bit" if layer["equal"] else f"MISSED: they differ by {layer['largest_difference']:.3g}"
    print(f"{steps:4} steps: outputs and gradients are {bits}")
    for name in ATTENTIONS:
        each = layer[name]
        print(f"      layer alone  {name:7} {each['peak_bytes'] / 2**20:9.1f} MiB {each['time_ms']:9.2f} ms")
    for index, name in enumerate(ATTENTIONS):
        each = translator[name]
        paper = PAPER[steps][index] if steps in PAPER else "-"
        print(f"      translator   {name:7} largest mini-batch {each['batch']:5} (paper {paper})", end="")
        print(f" {each.get('time_ms', 0):9.1f} ms, {each.get('time_at_plain_batch_ms', 0):9.1f} ms at the plain one's")


def run(arguments: Namespace) -> bool:
    """Measure everything, and write the results after each number of steps; return whether all gradients are equal."""
    device = device_of(arguments)
    sizes = SMALL if device.type == "cpu" else FULL
    answer: dict[str, Any] = {"conditions": conditions(device), "limit_bytes": sizes.limit, "paper": PAPER, "cases": {}}
    for steps in sizes.steps:
        case = {"layer": compare_layers(steps, sizes, device)}
        case["translator"] = compare_translators(steps, sizes, device)
        answer["cases"][steps] = case
        show(steps, case)
        save(out_of(arguments), answer)
    return all(case["layer"]["equal"] for case in answer["cases"].values())


def main() -> None:
    """Compare both layers."""
    parser = command_line(__doc__, "bench.memory.attention", "memory/attention.json")
    add_backend(parser)
    run_main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    main()
