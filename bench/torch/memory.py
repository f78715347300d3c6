"""A training step of a 3-D U-Net under a cap on PyTorch's memory: PyTorch alone, and with ucudnn.

    python -m bench.torch.memory                 about 7 minutes on an H200; --resume continues after a cut
    python -m bench.torch.memory --cap 0 --cap 44GiB --cap 36GiB --cap 34GiB     these caps, all ways in one run
    python -m bench.torch.memory --backend cpu   a trial of the script, without caps

4 x 1 x 128^3, base width 32, float32 (TF32), forward, backward and SGD. Each trial is a process of its own with
`torch.cuda.set_per_process_memory_fraction`, which bounds the memory of PyTorch's allocator. PyTorch alone has
`torch.backends.cudnn.benchmark` on, and falls back on algorithms that fit its memory. ucudnn has the measurements of a
first process without a cap; one trial measures under its smallest cap instead. The script finds the smallest caps by
bisection. With --cap it makes the trials of those caps instead, and in addition those of ucudnn without micro-batches:
the same algorithms within the same limit, on the whole mini-batch.
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
from bench.tools.script import add_backend, command_line, out_of, run_main, verdict
from ucudnn.units import parse_bytes

GIB = 2**30

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


class Trials:
    """Trials by way, mini-batch and cap; the results are written after each trial."""

    def __init__(self, arguments: Namespace, out: Path | None, database: str) -> None:
        self._arguments = arguments
        self._out = out
        self._database = database
        self.answer: dict[str, object] = {}
        self.made: dict[str, dict[str, object]] = {}
        if arguments.resume and out is not None and out.exists():
            self.made = load(out)["trials"]

    def run(self, way: str, batch: int, cap: int, *, cold: bool = False) -> dict[str, object]:
        """Return the result of a trial, under a cap in bytes; 0 is no cap."""
        key = f"{way} batch {batch} cap {cap}" + (" cold" if cold else "")
        if key not in self.made:
            arguments = self._arguments
            command = [sys.executable, "-m", __spec__.name, "--trial", way, "--within", str(cap), "--batch", str(batch)]
            for name in ("backend", "width", "levels", "side", "steps", "limit"):
                command += [f"--{name}", str(getattr(arguments, name))]
            environment = {**os.environ, "UCUDNN_DATABASE": "off" if cold else self._database}
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            if done.returncode:
                raise SystemExit(f"error: {key} ended with {done.returncode}:\n{done.stderr[-3000:]}")
            self.made[key] = json.loads(done.stdout.splitlines()[-1])
            self.save()
        found = self.made[key]
        how = f"{found['step_ms']:9.1f} ms a step" if found["trains"] else f"fails: {found['reason']}"[:90]
        print(f"{way:9} batch {batch} cap {cap / GIB:6.1f} GiB{' cold' if cold else ''}: {how}", flush=True)
        return found

    def smallest_cap(self, way: str, batch: int, tolerance: int, guess: int = 0) -> int:
        """Return the smallest cap under which steps succeed, to a tolerance; a good guess saves trials."""
        free = self.run(way, batch, 0)
        if not free["trains"]:
            raise SystemExit(f"error: {way} does not train without a cap: {free['reason']}")
        high = -(-int(str(free["reserved_bytes"])) // tolerance) * tolerance
        low = 0
        if guess and self.run(way, batch, guess)["trains"]:
            high = guess
        elif guess:
            low, high = guess, max(high, guess + tolerance)
        while not self.run(way, batch, high)["trains"]:
            low, high = high, high + 4 * tolerance
        while high - low > tolerance:
            middle = (low + high) // 2 // tolerance * tolerance
            if self.run(way, batch, middle)["trains"]:
                high = middle
            else:
                low = middle
        return high

    def save(self) -> None:
        """Write all trials."""
        save(self._out, {**self.answer, "trials": self.made})


def compare(arguments: Namespace, trials: Trials) -> None:
    """Make all trials; print the results beside the values that were aimed at."""
    batch, tolerance = arguments.batch, parse_bytes(arguments.tolerance)
    trials.run("ucudnn", batch, 0)  # measures for the other trials
    caps = {"ucudnn": trials.smallest_cap("ucudnn", batch, tolerance)}
    caps["pytorch"] = trials.smallest_cap("pytorch", batch, tolerance, guess=caps["ucudnn"])
    same = caps["pytorch"]
    rows = [(way, batch, cap, trials.run(way, batch, cap)) for way, cap in caps.items()]
    rows.append(("ucudnn", batch, same, trials.run("ucudnn", batch, same)))
    rows += [(way, batch, 0, trials.run(way, batch, 0)) for way in caps]
    trials.run("ucudnn", batch, caps["ucudnn"], cold=True)
    larger = batch
    while trials.run("ucudnn", larger + 1, same)["trains"]:
        larger += 1
    print("\nway       batch   cap GiB   step ms   allocated GiB")
    for way, size, cap, found in rows:
        cap_text = f"{cap / GIB:.1f}" if cap else "none"
        allocated = int(str(found["allocated_bytes"])) / GIB
        step = f"{found['step_ms']:9.1f}" if found["trains"] else "    fails"
        print(f"{way:8} {size:6} {cap_text:>9} {step} {allocated:15.1f}")
    print(f"largest mini-batch within {same / GIB:.1f} GiB: PyTorch {batch}, ucudnn {larger}")
    at_same = {way: trials.run(way, batch, same) for way in caps}
    slower = float("inf")
    if at_same["ucudnn"]["trains"]:
        slower = float(str(at_same["ucudnn"]["step_ms"])) / float(str(at_same["pytorch"]["step_ms"]))
    trials.answer |= {
        "conditions": trials.run("pytorch", batch, 0)["conditions"],
        "smallest_caps": caps,
        "largest_batch_at_pytorchs_smallest_cap": {"pytorch": batch, "ucudnn": larger},
        "required": [
            verdict("smallest cap, of PyTorch's", caps["ucudnn"] / same, (same - tolerance) / same),
            verdict("step at PyTorch's smallest cap, of PyTorch's", slower, 1.0),
        ],
    }
    trials.save()


def within_caps(arguments: Namespace, trials: Trials) -> None:
    """Make the trials of all ways under the caps of the command line, in one run."""
    caps = [parse_bytes(text) for text in arguments.cap]
    trials.answer["caps"] = caps
    for way in ("ucudnn", "undivided", "pytorch"):
        if way in POLICIES:
            trials.run(way, arguments.batch, 0)  # measures for the other trials
        for cap in caps:
            trials.answer["conditions"] = trials.run(way, arguments.batch, cap)["conditions"]
    trials.save()


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
    parser.add_argument("--tolerance", default="1GiB", help="tolerance of the smallest caps (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="take the trials that an earlier run wrote")
    parser.add_argument("--database", help="file of ucudnn's measurements (beside --out)")
    parser.add_argument("--cap", action="append", help="such as 36GiB; 0 for none; may be repeated (bisection)")
    parser.add_argument("--trial", choices=("pytorch", *POLICIES), help=SUPPRESS)
    parser.add_argument("--within", type=int, default=0, help=SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Make one trial, or all."""
    arguments = parsed()
    if arguments.trial:
        print(json.dumps(trial(arguments)))
        return
    out = out_of(arguments)
    if arguments.backend != "cpu" and out is not None:
        trials = Trials(arguments, out, arguments.database or str(out.with_suffix(".db")))
        (within_caps if arguments.cap else compare)(arguments, trials)
        return
    with TemporaryDirectory() as folder:
        database = arguments.database or str(Path(folder) / "measurements.db")
        arguments.side, arguments.width, arguments.levels, arguments.batch, arguments.steps = 8, 2, 2, 2, 1
        trials = Trials(arguments, out, database)
        if arguments.cap:
            within_caps(arguments, trials)
            return
        for way in ("ucudnn", "pytorch"):
            trials.run(way, 2, 0)


if __name__ == "__main__":
    run_main(main)
