"""What the checkout of ucudnn that is on the path takes: one line of JSON, which `bench.gpu.two_commits` reads.

Not a script of its own. It imports no other module of bench but the networks, because it measures older checkouts, too.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from statistics import median
from time import perf_counter
from typing import Any

import torch

import ucudnn.torch

NETWORKS = {
    "resnet50": (64, (3, 224, 224)),
    "densenet121": (32, (3, 224, 224)),
    "vgg16": (32, (3, 224, 224)),
    "inception_v3": (32, (3, 299, 299)),
    "unet2d": (8, (3, 256, 256)),
    "unet3d": (2, (1, 64, 64, 64)),
}
"""Mini-batches and sizes of the samples."""

_CALLS, _SAMPLES = 100, 40


def figures(on_cpu: bool, tuning_s: float) -> dict[str, float]:
    """Measure the checkout that is imported here."""
    device = torch.device("cpu" if on_cpu else "cuda")
    wait: Callable[[], object] = (lambda: None) if on_cpu else torch.cuda.synchronize
    within: dict[str, Any] = {"workspace_limit": "64MiB", "tune": "first"} | ({"backend": "cpu"} if on_cpu else {})
    if not on_cpu:
        torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True
    found = {}
    x, w = torch.randn(8, 16, 14, 14, device=device), torch.randn(16, 16, 3, 3, device=device)
    with ucudnn.torch.enable(**within):
        found["call within 64 MiB, us"] = _call_us(lambda: torch.nn.functional.conv2d(x, w, padding=1), wait)
    found |= _alexnet(on_cpu)
    for name in ["small"] if on_cpu else NETWORKS:
        step = _training_step(name, device)
        with ucudnn.torch.enable(**(within if on_cpu else {})) as on:
            began = perf_counter()
            while perf_counter() - began < tuning_s and any(each.phase != "settled" for each in on.report().tuned):
                for _ in range(5):
                    step()
            found[f"{name}, ms"] = _step_ms(step, wait)
    return found


def _call_us(call: Callable[[], object], wait: Callable[[], object]) -> float:
    """Return the host's time of one call: the median of loops, between which it waits for the device."""
    samples = []
    for _ in range(_SAMPLES):
        wait()
        began = perf_counter()
        for _ in range(_CALLS):
            call()
        samples.append((perf_counter() - began) / _CALLS * 1e6)
    return median(samples)


def _step_ms(step: Callable[[], object], wait: Callable[[], object]) -> float:
    """Return the time of a step: the median of fives, between which it waits for the device."""
    samples = []
    for number in range(7):
        wait()
        began = perf_counter()
        for _ in range(5):
            step()
        wait()
        if number > 1:  # the first ones plan
            samples.append((perf_counter() - began) / 5 * 1e3)
    return median(samples)


def _alexnet(on_cpu: bool) -> dict[str, float]:
    """Return the time of AlexNet's convolutions within 64 MiB, as the command line measures it."""
    options = ["--workspace", "64MiB", "--json", *(["--backend", "cpu", "--batch", "2"] if on_cpu else [])]
    command = [sys.executable, "-m", "ucudnn", "time", "alexnet", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    kernels = json.loads(done.stdout)["kernels"]
    return {"alexnet's convolutions within 64 MiB, ms": sum(each["executed_ms"] * each["count"] for each in kernels)}


def _training_step(name: str, device: torch.device) -> Callable[[], object]:
    """Return a function that takes one step of SGD."""
    models = import_module("models")  # those of bench/memory, which is on the path
    torch.manual_seed(0)
    if name == "small":
        model, x = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten()), torch.randn(2, 3, 8, 8)
    else:
        batch, shape = NETWORKS[name]
        model, x = getattr(models, name)(), torch.randn(batch, *shape, device=device)
    model.to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        outputs = model(x)
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        labels = torch.zeros(logits.shape[:1] + logits.shape[2:], dtype=torch.long, device=device)
        torch.nn.functional.cross_entropy(logits, labels).backward()
        optimizer.step()

    return step


def main() -> None:
    """Measure, and print the figures."""
    print(json.dumps(figures("--on-cpu" in sys.argv, float(sys.argv[1]))))
