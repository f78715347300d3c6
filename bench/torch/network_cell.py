"""Trains one network in one form under one setting for a while, and prints what that took as one line of JSON.

    python -m bench.torch.network_cell --network resnet50 --form nchw --setting auto
    python -m bench.torch.network_cell --network small --backend cpu --steps 2

`bench.torch.networks` runs it in a process for each cell. The setting is turned on before the first step:

    stock       PyTorch with cudnn.benchmark       stock-off   the same without cudnn.benchmark
    auto        workspace_limit="auto" over stock   auto-off    over stock-off
    64MiB       ucudnn.torch.enable(workspace_limit="64MiB"), as any other size
    64MiB-first the same with tune="first", which measures before the first step

The forms are nchw and last (float32 with TF32, channels first and last) and bf16 (channels last, bfloat16 autocast).
Times of steps are those between events at their ends. Nothing waits for the GPU between steps, those of tuning
included: a host that is nearly as slow as the GPU would lose its lead at each wait, and bound the steps. The host's
time is that of the forward pass, the backward pass and the optimizer, each issued to an idle device: a whole step may
be more than the queue of the device holds, and then the host waits. With --turns, `by_turns` has steps and the host's
time with and without ucudnn by turns in one process, for some seconds: `step` is the ratio of steps, and `over_us` by
how many microseconds each convolution and gradient takes the host longer. The second command above is a trial of the
script.

With --wait, the process imports all and makes its model on the CPU, with one thread, and then waits for a line of
input. Nothing touches CUDA before, so another process can measure meanwhile; if something does, the cell ends in an
error. When the input ends instead, the process ends. With --lock, it opens CUDA and then takes a lock, which it holds
to its end. So a process opens CUDA while one that has answered is being torn down, and does nothing else meanwhile.

`spent_s` is what each part of the process took, in seconds, from its start on. The process ends without Python's and
CUDA's own tearing down.

An error, such as memory that is not enough, is an answer, too. Each answer names the files of ucudnn that ran.
"""

import fcntl
import json
import os
import resource
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import median
from time import CLOCK_BOOTTIME, clock_gettime, perf_counter
from traceback import format_exc

import torch
from torch import nn

import ucudnn.torch
from bench.tools.script import run_main
from bench.torch.measuring import conditions, torch_command_line
from bench.torch.network_code import ran
from bench.torch.network_gpu import gpu_state
from bench.torch.network_setting import SETTINGS, database_of, is_settled, phase_of, turned_on
from bench.torch.network_step import FORMS, NETWORKS, Step, model_of, step_of
from bench.torch.network_times import Clock, by_turns, host_ms, time_in_python
from ucudnn.torch.overrides import process_overrides

_MOST_TUNED_STEPS = 5000
_HIGH = 1000
"""A number that files of other libraries do not reach; a process may have 1024 of them."""


def warm(on: "ucudnn.torch.Enabled | None", step: Step, clock: Clock, arguments: Namespace) -> dict[str, object]:
    """Take steps until all is tuned or the time is up, and at least those of --steps.

    Of the longest steps, the answer has the milliseconds, the number, and what the tuner did before and after them.
    """
    marks, begin, phases = [clock.mark()], perf_counter(), [phase_of(on)]
    for number in range(1, _MOST_TUNED_STEPS):
        step()
        marks.append(clock.mark())
        phases.append(phase_of(on))
        if number % 5 == 0 or arguments.backend == "cpu":
            late = perf_counter() - begin > arguments.tuning_seconds
            if number >= arguments.steps and (late or is_settled(on)):
                break
    times = clock.between_ms(marks)
    return {
        "settled": is_settled(on),
        "tuning_steps": len(times),
        "tuning_s": perf_counter() - begin,
        "tuning_mean_ms": sum(times) / len(times),
        "worst_steps": [
            {"ms": ms, "step": number, "phase": phases[number], "next": phases[number + 1]}
            for ms, number in sorted((ms, number) for number, ms in enumerate(times))[-5:]
        ],
        "step_100_ms": median(times[95:105]) if len(times) >= 105 else None,
    }


def memory_of(device: torch.device) -> dict[str, int]:
    """Return peaks of PyTorch's memory and the memory that the process takes on the device, in bytes."""
    if device.type == "cpu":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "in_use": total - free,
    }


class Spent:
    """The seconds that each part of a process took, by name. The first part began with the process."""

    def __init__(self) -> None:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        self._last = ticks / os.sysconf("SC_CLK_TCK")
        self.seconds: dict[str, float] = {}

    def end(self, part: str) -> None:
        """End a part; the next one begins."""
        now = clock_gettime(CLOCK_BOOTTIME)
        self.seconds[part] = now - self._last
        self._last = now


def measure(arguments: Namespace, device: torch.device, model: nn.Module, spent: Spent) -> dict[str, object]:
    """Return what one cell has measured."""
    database = database_of(arguments)
    on = turned_on(arguments.setting, arguments.backend, arguments.database)
    (step, kernels), clock = step_of(arguments, device, model), Clock(device)
    clock.wait()
    spent.end("to device")
    begin = perf_counter()
    losses = [step()]
    clock.wait()
    answer: dict[str, object] = {"database": database, "first_step_s": perf_counter() - begin}
    spent.end("first step")
    answer |= warm(on, step, clock, arguments) | {"peaks": memory_of(device)}
    spent.end("warm-up")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    marks = [clock.mark()]
    for _ in range(arguments.steps):
        losses.append(step())
        marks.append(clock.mark())
    times = clock.between_ms(marks)
    answer["gpu_state"] = gpu_state(device)
    spent.end("steps")
    host = host_ms(step, clock)
    spent.end("host")
    answer |= {"step_ms": median(times), "samples_ms": times, "steady": memory_of(device)}
    answer |= {"host_ms": sum(host.values()), "host_parts_ms": host, "kernels": kernels}
    answer["losses"] = [float(each) for each in losses]
    if on is not None:
        summary = on.report()
        answer |= {"kinds": summary.kinds(), "left": summary.left, "tuned": [each.to_dict() for each in summary.tuned]}
        answer["gated"] = gated = process_overrides.is_gated(device.type)
        answer["by_turns"] = by_turns(on, step, clock, kernels) if arguments.turns else {}
        spent.end("turns")
        answer["python"] = {} if gated else time_in_python(on, step, clock)  # last, because it changes what runs
        spent.end("python")
    return {"conditions": conditions(device), **answer}


def prepared(arguments: Namespace, spent: Spent) -> nn.Module:
    """Return the network, on the CPU, when its turn has come.

    Raises:
        RuntimeError: if CUDA was touched before.
        SystemExit: if the process that started this one is gone.
    """
    threads = torch.get_num_threads()
    if arguments.wait:
        torch.set_num_threads(1)  # another process may be measuring
    model = model_of(arguments.network)
    torch.optim.SGD(model.parameters(), lr=1e-3)  # the first optimizer imports 800 modules, which takes seconds
    spent.end("model")
    if arguments.wait:
        if torch.cuda.is_initialized():
            raise RuntimeError("CUDA was touched before it was this process's turn")
        torch.set_num_threads(threads)
        if not sys.stdin.readline():
            raise SystemExit("error: nobody waits for the answer")
        spent.end("waiting")
    return model


def lock(path: Path) -> None:
    """Wait for a lock, which is held until the process has ended, and so has given its GPU back.

    A process that ends closes its files in the order of their numbers, so this one comes after those of the GPU.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(file, fcntl.LOCK_EX)
    fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, min(_HIGH, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1))


def answer_of(arguments: Namespace) -> dict[str, object]:
    """Return what was measured, or the error that ended it."""
    spent = Spent()
    spent.end("imports")
    try:
        model = prepared(arguments, spent)
        if arguments.backend != "cpu" and not torch.cuda.is_available():
            raise RuntimeError("PyTorch has no GPU; --backend cpu tries the script out")
        device = torch.device("cpu" if arguments.backend == "cpu" else "cuda")
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent.end("CUDA")
        if arguments.lock is not None:
            lock(arguments.lock)
            spent.end("lock")
        used = {"measured": sorted(os.sched_getaffinity(0))}
        return {**measure(arguments, device, model, spent), "cores": used, "spent_s": spent.seconds}
    except Exception as error:  # noqa: BLE001  whatever it is, it is what became of the cell
        print(format_exc(), file=sys.stderr, flush=True)
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Measure, print one line of JSON, and end the process, with status 1 if there was an error."""
    arguments = _parser().parse_args()
    answer = answer_of(arguments)
    sys.stderr.flush()
    print(json.dumps(answer | {"code": ran(arguments.setting, arguments.backend)}), flush=True)
    os._exit("error" in answer)  # to tear the interpreter and all tensors down would keep the GPU from the next cell


def _parser() -> ArgumentParser:
    parser = torch_command_line(__doc__, __spec__.name)
    parser.add_argument("--network", choices=NETWORKS, default="resnet50", help="network (%(default)s)")
    parser.add_argument("--form", choices=FORMS, default="nchw", help="type and layout (%(default)s)")
    parser.add_argument("--setting", default="auto", help=f"{', '.join(SETTINGS)}, or a size (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (%(default)s)")
    parser.add_argument("--tuning-seconds", type=float, default=30, help="most seconds of tuning (%(default)s)")
    parser.add_argument("--database", help="file of the database; it is empty if the file is not there (default place)")
    parser.add_argument("--wait", action="store_true", help="wait for a line of input before CUDA is touched")
    parser.add_argument("--turns", action="store_true", help="compare the host's time with and without ucudnn by turns")
    parser.add_argument("--lock", type=Path, help="file that is locked while this process measures")
    return parser


if __name__ == "__main__":
    run_main(main)
