"""A training step of a 3-D U-Net under a cap on PyTorch's memory: PyTorch alone, and with ucudnn.

    python -m bench.torch.memory --cap 0 --cap 44GiB --cap 36GiB --cap 34GiB     0 is no cap
    python -m bench.torch.memory --backend cpu --out trial.json                  a trial of the script

4 x 1 x 128^3, base width 32, float32 (TF32), forward, backward and SGD. Each trial is a process of its own with
`torch.cuda.set_per_process_memory_fraction`, which bounds the memory of PyTorch's allocator. PyTorch alone has
`torch.backends.cudnn.benchmark` on, and falls back on algorithms that fit its memory. ucudnn runs in micro-batches, and
`undivided` with the same algorithms within the same limit, on the whole mini-batch. Both have the measurements of a
first process without a cap. A trial that the file has is kept.
"""

import json
import os
import subprocess
import sys
from argparse import SUPPRESS, Namespace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench.tools.results import load, save
from bench.tools.script import add_backend, command_line, out_of, run_main
from ucudnn.units import parse_bytes

POLICIES = {"ucudnn": "powerOfTwo", "undivided": "undivided"}
"""The ways that limit the workspace of convolutions, with their policies."""


def trial(arguments: Namespace) -> dict[str, object]:
    """Take some steps in this process under a cap; return their time and memory, or the reason why they fail."""
    import torch

    import ucudnn.torch
    from bench.memory.models import UNet
    from bench.torch.measuring import conditions, device_of, elapsed_ms, training_step

    device = device_of(arguments)
    on_gpu = device.type == "cuda"
    if on_gpu and arguments.within:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, arguments.within / total), device)
    on = None
    if arguments.trial in POLICIES:
        policy = POLICIES[arguments.trial]
        on = ucudnn.torch.enable(backend=arguments.backend, workspace_limit=arguments.limit, policy=policy)
    answer: dict[str, object] = {"conditions": conditions(device)}
    try:
        torch.manual_seed(0)
        widths = [arguments.width << level for level in range(arguments.levels)]
        model = UNet(3, [(width, 2 * width) for width in widths], channels=1, classes=3).to(device)
        side = (arguments.side,) * 3
        x = torch.randn(arguments.batch, 1, *side, device=device)
        step = training_step(model, x, torch.randint(3, (arguments.batch, *side), device=device))
        answer["first_ms"] = elapsed_ms(step, device)
        if on_gpu:  # the memory of the measurements in the first step does not count
            answer["first_reserved_bytes"] = torch.cuda.max_memory_reserved()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        step()
        samples_ms = [elapsed_ms(step, device) for _ in range(arguments.steps)]
        answer |= {"samples_ms": samples_ms, "step_ms": median(samples_ms)}
        answer["trains"] = True
    except RuntimeError as error:  # out of memory, or PyTorch finds no engine that fits
        answer |= {"trains": False, "reason": str(error).split("\n")[0][:300]}
    if on_gpu:
        answer |= {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }
    if on is not None:
        summary = on.report()
        answer |= {"left": summary.left, "calls": summary.calls}
        answer["configurations"] = [(each.problem, each.configuration) for each in summary.layers]
    return answer


def run(arguments: Namespace, out: Path | None, database: str) -> None:
    """Make the trials that the file lacks, and write them after each one."""
    caps = [parse_bytes(text) for text in arguments.cap or ["0"]]
    answer = load(out) if out is not None and out.exists() else {"trials": {}}
    made = answer["trials"]
    for way in ("ucudnn", "undivided", "pytorch"):
        for cap in [0, *(each for each in caps if each)] if way in POLICIES else caps:  # without a cap ucudnn measures
            key = f"{way} batch {arguments.batch} cap {cap}"
            if key not in made:
                options = ["--trial", way, "--within", str(cap)]
                for name in ("backend", "batch", "width", "levels", "side", "steps", "limit"):
                    options += [f"--{name}", str(getattr(arguments, name))]
                environment = {**os.environ, "UCUDNN_DATABASE": database}
                command = [sys.executable, "-m", __spec__.name, *options]
                done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
                if done.returncode:
                    raise SystemExit(f"error: {key} ended with {done.returncode}:\n{done.stderr[-3000:]}")
                made[key] = json.loads(done.stdout.splitlines()[-1])
            found = made[key]
            print(key, found["step_ms"] if found["trains"] else found["reason"], flush=True)
            save(out, {"caps": caps, "conditions": found["conditions"], "trials": made})


def parsed() -> Namespace:
    """Return the command line."""
    parser = command_line(__doc__, __spec__.name, "torch/memory.json")
    add_backend(parser)
    parser.add_argument("--batch", type=int, default=4, help="mini-batch size (%(default)s)")
    parser.add_argument("--side", type=int, default=128, help="depth, height and width of the images (%(default)s)")
    parser.add_argument("--width", type=int, default=32, help="base width of the network (%(default)s)")
    parser.add_argument("--levels", type=int, default=4, help="levels of the network (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a trial (%(default)s)")
    parser.add_argument("--limit", default="1GiB", help="ucudnn's limit for each convolution (%(default)s)")
    parser.add_argument("--cap", action="append", help="such as 36GiB; 0 for none; may be repeated (0)")
    parser.add_argument("--trial", choices=("pytorch", *POLICIES), help=SUPPRESS)
    parser.add_argument("--within", type=int, default=0, help=SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Make one trial, or all."""
    arguments = parsed()
    if arguments.trial:
        print(json.dumps(trial(arguments)))
        return
    if arguments.backend == "cpu":
        arguments.side, arguments.width, arguments.levels, arguments.batch, arguments.steps = 8, 2, 2, 2, 1
    with TemporaryDirectory() as folder:
        run(arguments, out_of(arguments), str(Path(folder) / "measurements.db"))


if __name__ == "__main__":
    run_main(main)
