"""Trains one network in one form under one setting for a while, and prints what that took as one line of JSON.

    python -m bench.torch.network_cell --network resnet50 --form nchw --setting auto
    python -m bench.torch.network_cell --network small --backend cpu --steps 2

`bench.torch.networks` runs it in a process for each cell. The setting is turned on before the first step:

    stock       PyTorch with cudnn.benchmark       stock-off   the same without cudnn.benchmark
    auto        workspace_limit="auto" over stock   auto-off    over stock-off
    passed      "auto" that tries nothing, over stock: each convolution makes the detour through Python and is passed on
    64MiB       ucudnn.torch.enable(workspace_limit="64MiB"), as any other size
    64MiB-first the same with tune="first", which measures before the first step

The forms are nchw and last (float32 with TF32, channels first and last) and bf16 (channels last, bfloat16 autocast).
Times of steps are those between events at their ends. Nothing waits for the GPU between timed steps. The host's time is
that of the forward pass, the backward pass and the optimizer, each issued to an idle device: a whole step may be more
than the queue of the device holds, and then the host waits. With --turns, `host_by_turns` is the same with and without
ucudnn by turns in one process, for some seconds: `over_us` is by how much longer each convolution and gradient takes,
in microseconds. The second command above is a trial of the script.

With --wait, the process imports all and makes its model on the CPU, with one thread, and then waits for a line of
input. Nothing touches CUDA before, so another process can measure meanwhile; if something does, the cell ends in an
error. When the input ends instead, the process ends. With --lock, it takes a lock that others hold while they measure.

`spent_s` is what each part of the process took, in seconds, from its start on. The process ends without Python's and
CUDA's own tearing down.

An error, such as memory that is not enough, is an answer, too. Each answer names the files of ucudnn that ran.
"""

import fcntl
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import CLOCK_BOOTTIME, clock_gettime, perf_counter
from traceback import format_exc
from typing import Any

import torch
from torch import nn

import ucudnn.torch
from bench.memory import models as own
from bench.tools.script import run_main
from bench.torch.measuring import conditions, torch_command_line
from bench.torch.models import small_resnet
from bench.torch.network_code import ran
from ucudnn.torch.overrides import process_overrides
from ucudnn.torch.tuning.auto_interceptor import AutoInterceptor

FORMS = ("nchw", "last", "bf16")
SETTINGS = ("stock", "auto", "stock-off", "auto-off", "64MiB")
PASSED = "passed"
FIRST = "-first"
CLASSES = 1000
TRIAL = "small"
"""A network for trials of the script."""

_MOST_TUNED_STEPS = 5000
_HOST_STEPS = 9
_TURNS = 7
_LEAST_TURNS = 3
_TURN_STEPS = 5
_TURNS_S = 6.0
"""Seconds after which no turn begins beyond the least ones."""
_PARTS = ("forward", "backward", "optimizer")

NETWORKS: dict[str, tuple[str, int, tuple[int, ...]]] = {
    "resnet50": ("own", 256, (3, 224, 224)),
    "efficientnet_b0": ("timm", 128, (3, 224, 224)),
    "regnety_032": ("timm", 128, (3, 224, 224)),
    "convnext_tiny": ("timm", 64, (3, 224, 224)),
    "densenet121": ("own", 64, (3, 224, 224)),
    "vgg16": ("own", 64, (3, 224, 224)),
    "inception_v3": ("own", 64, (3, 299, 299)),
    "unet2d": ("own", 16, (3, 256, 256)),
    "unet3d": ("own", 4, (1, 64, 64, 64)),
    "mobilenetv3_large_100": ("timm", 128, (3, 224, 224)),
    "resnext50_32x4d": ("timm", 128, (3, 224, 224)),
    "hrnet_w18": ("timm", 64, (3, 224, 224)),
    TRIAL: ("", 4, (3, 16, 16)),
}
"""Source of the model, mini-batch, and shape of a sample; 'own' stands for bench.memory.models."""


def model_of(name: str) -> nn.Module:
    """Return a network with random weights, the same each time."""
    torch.manual_seed(0)
    if name == TRIAL:
        return small_resnet(4, 1)
    if NETWORKS[name][0] == "own":
        model: nn.Module = getattr(own, name)()
        return model
    import timm

    made: nn.Module = timm.create_model(name, num_classes=CLASSES)
    return made


def loss_of(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of a network's outputs, which may be logits of images or of their pixels."""
    if isinstance(outputs, tuple):
        return own.inception_loss(outputs, labels)
    wanted = labels % outputs.shape[1]
    if outputs.dim() > 2:
        wanted = wanted.view(-1, *(1,) * (outputs.dim() - 2)).expand(len(wanted), *outputs.shape[2:])
    return nn.functional.cross_entropy(outputs.float(), wanted)


Step = Callable[..., torch.Tensor]
"""Takes a step, and returns the loss; it may be given a function to call before each of _PARTS and after the last."""


def _nothing() -> None:
    pass


def step_of(arguments: Namespace, device: torch.device, made: nn.Module | None = None) -> tuple[Step, int]:
    """Return a function that takes a step of SGD with momentum, and the number of convolutions and gradients in it.

    Args:
        arguments: have the network and its form.
        device: where it is trained.
        made: the network, if it is made already.
    """
    model = (model_of(arguments.network) if made is None else made).to(device).train()
    _, batch, shape = NETWORKS[arguments.network]
    x = torch.randn(batch, *shape, device=device)
    labels = torch.randint(CLASSES, (len(x),), device=device)
    if arguments.form != "nchw":
        form = {4: torch.channels_last, 5: torch.channels_last_3d}[x.dim()]
        untyped: Any = model  # the annotations of Module.to do not have this overload
        untyped.to(memory_format=form)
        x = x.to(memory_format=form)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    autocast = partial(torch.autocast, device.type, torch.bfloat16) if arguments.form == "bf16" else nullcontext

    def step(between: Callable[[], None] = _nothing) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        between()
        with autocast():
            loss = loss_of(model(x), labels)
        between()
        loss.backward()
        between()
        optimizer.step()
        between()
        return loss.detach()

    layers = sum(isinstance(each, nn.modules.conv._ConvNd) for each in model.modules())
    return step, 3 * layers - 1  # the images need no gradient


def host_ms(step: Step, clock: "Clock", steps: int = _HOST_STEPS) -> dict[str, float]:
    """Return the host's median time for each part of a step, in milliseconds; the device is idle before each part."""
    taken: dict[str, list[float]] = {each: [] for each in _PARTS}
    for _ in range(steps):
        marks: list[float] = []

        def between(marks: list[float] = marks) -> None:
            marks.append(perf_counter())
            clock.wait()
            marks.append(perf_counter())

        step(between)
        for number, part in enumerate(_PARTS):
            taken[part].append((marks[2 * number + 2] - marks[2 * number + 1]) * 1e3)
    return {part: median(times) for part, times in taken.items()}


def host_by_turns(on: "ucudnn.torch.Enabled", step: Step, clock: "Clock", kernels: int) -> dict[str, object]:
    """Return the host's time of a step with and without ucudnn, by turns in one process; empty before all is settled.

    Processes differ by more than what is asked, because a host is faster at times.
    """
    if not is_settled(on):
        return {}
    taken: dict[str, list[float]] = {"ours_ms": [], "stock_ms": []}
    begin = perf_counter()
    for turn in range(_TURNS):
        if turn >= _LEAST_TURNS and perf_counter() - begin > _TURNS_S:
            break
        for name, interceptor in (("ours_ms", on._interceptor), ("stock_ms", None)):
            process_overrides.use(interceptor)
            step()
            taken[name].append(sum(host_ms(step, clock, _TURN_STEPS).values()))
    process_overrides.use(on._interceptor)
    over_us = [(ours - stock) * 1e3 / kernels for ours, stock in zip(*taken.values(), strict=True)]
    return {**taken, "over_us": median(over_us), "kernels": kernels}


class Clock:
    """Marks of time on a device, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def mark(self) -> Any:
        """Return a mark after all work so far."""
        if not self._on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_ms(self, marks: list[Any]) -> list[float]:
        """Return the milliseconds between successive marks, after all of them."""
        self.wait()
        return [float(a.elapsed_time(b)) if self._on_gpu else (b - a) * 1e3 for a, b in pairwise(marks)]

    def wait(self) -> None:
        """Wait for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()


def turned_on(setting: str, backend: str, database: str | None = None) -> "ucudnn.torch.Enabled | None":
    """Turn a setting on, before the first step; without a file for the database, its default place is used."""
    way = setting.removesuffix("-off")
    torch.backends.cudnn.benchmark = way == setting
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    if way == "stock":
        return None
    if way == PASSED:
        return ucudnn.torch.enable(workspace_limit="auto", trial_share=0, database=database)
    options = {"database": database, **({"tune": FIRST.removeprefix("-")} if way.endswith(FIRST) else {})}
    return ucudnn.torch.enable(backend=backend, workspace_limit=way.removesuffix(FIRST), **options)


def is_settled(on: "ucudnn.torch.Enabled | None") -> bool:
    """Whether nothing is tried any more."""
    return on is None or all(each.phase == "settled" for each in on.report().tuned)


def warm(on: "ucudnn.torch.Enabled | None", step: Step, clock: Clock, arguments: Namespace) -> dict[str, object]:
    """Take steps until all is tuned or the time is up, and at least those of --steps."""
    marks, begin = [clock.mark()], perf_counter()
    for number in range(1, _MOST_TUNED_STEPS):
        step()
        marks.append(clock.mark())
        if number % 5 == 0 or arguments.backend == "cpu":
            clock.wait()  # so that the host's time is that of the device
            late = perf_counter() - begin > arguments.tuning_seconds
            if number >= arguments.steps and (late or is_settled(on) or arguments.setting == PASSED):
                break
    times = clock.between_ms(marks)
    return {
        "settled": is_settled(on),
        "tuning_steps": len(times),
        "tuning_s": perf_counter() - begin,
        "tuning_mean_ms": sum(times) / len(times),
        "worst_steps_ms": sorted(times)[-5:],
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


def database_of(arguments: Namespace) -> str:
    """Return whether a database of an earlier process of the cell is kept, is empty, or is not used at all."""
    if arguments.setting.startswith("stock"):
        return "none"
    if arguments.database is None:
        return "default place"
    return "kept" if Path(arguments.database).exists() else "empty"


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
        answer["host_by_turns"] = host_by_turns(on, step, clock, kernels) if arguments.turns else {}
        spent.end("turns")
        answer["python"] = {} if gated else time_in_python(on, step, clock)  # last, because it changes what runs
        spent.end("python")
    return {"conditions": conditions(device), **answer}


def time_in_python(on: "ucudnn.torch.Enabled | None", step: Callable[[], Any], clock: Clock) -> dict[str, float]:
    """Return the microseconds of a call inside the interceptor, and those of PyTorch's own operator in it.

    Calls that are passed on to PyTorch count apart from those of which at least a part is replaced. Each step begins
    with an idle device. What a call costs before and after the interceptor's Python code is not seen. Where there is a
    gate, no call comes to the interceptor.
    """
    interceptor: Any = None if on is None else on._interceptor
    if not isinstance(interceptor, AutoInterceptor):
        return {}
    taken: dict[str, list[float]] = {"passed": [], "stock": [], "replaced": []}

    def stock(run: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*arguments: Any) -> Any:
            begin = perf_counter()
            found = run(*arguments)
            taken["stock"].append((perf_counter() - begin) * 1e6)
            return found

        return inner

    def inside(run: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*arguments: Any) -> Any:
            known, replaced, begin = len(taken["stock"]), counts(), perf_counter()
            found = run(*arguments)
            spent = (perf_counter() - begin) * 1e6
            passed = len(taken["stock"]) > known and counts() == replaced
            taken["passed" if passed else "replaced"].append(spent)
            return found

        return inner

    def counts() -> int:
        return sum(kernel.calls for tuner in interceptor.tuners().values() for kernel in tuner.kernels.values())

    for name in ("forward", "backward"):
        setattr(interceptor, f"_pass_{name}", stock(getattr(interceptor, f"_pass_{name}")))
        setattr(interceptor, name, inside(getattr(interceptor, name)))
    process_overrides.refresh()
    for _ in range(_HOST_STEPS):
        clock.wait()
        step()
    calls = {f"{name}_calls_of_a_step": len(each) / _HOST_STEPS for name, each in taken.items()}
    return calls | {f"{name}_us": median(each) for name, each in taken.items() if each}


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
    """Wait for a lock, which is held until the process has ended, and so has given its GPU back."""
    fcntl.flock(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC), fcntl.LOCK_EX)


def answer_of(arguments: Namespace) -> dict[str, object]:
    """Return what was measured, or the error that ended it."""
    spent = Spent()
    spent.end("imports")
    cores = sorted(os.sched_getaffinity(0))
    try:
        model = prepared(arguments, spent)
        if arguments.lock is not None:
            lock(arguments.lock)
        if arguments.backend != "cpu" and not torch.cuda.is_available():
            raise RuntimeError("PyTorch has no GPU; --backend cpu tries the script out")
        device = torch.device("cpu" if arguments.backend == "cpu" else "cuda")
        used = {"prepared": cores, "measured": sorted(os.sched_getaffinity(0))}
        return {**measure(arguments, device, model, spent), "cores": used, "spent_s": spent.seconds}
    except Exception as error:  # noqa: BLE001  whatever it is, it is what became of the cell
        print(format_exc(), file=sys.stderr, flush=True)
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Measure, print one line of JSON, and end the process, with status 1 if there was an error."""
    arguments = _parser().parse_args()
    answer = answer_of(arguments)
    print(json.dumps(answer | {"code": ran(arguments.setting, arguments.backend)}), flush=True)
    sys.stderr.flush()
    os._exit("error" in answer)  # to tear the interpreter and all tensors down would keep the GPU from the next cell


def _parser() -> ArgumentParser:
    parser = torch_command_line(__doc__, __spec__.name)
    parser.add_argument("--network", choices=NETWORKS, default="resnet50", help="network (%(default)s)")
    parser.add_argument("--form", choices=FORMS, default="nchw", help="type and layout (%(default)s)")
    parser.add_argument("--setting", default="auto", help=f"{', '.join(SETTINGS)}, {PASSED}, or a size (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (%(default)s)")
    parser.add_argument("--tuning-seconds", type=float, default=30, help="most seconds of tuning (%(default)s)")
    parser.add_argument("--database", help="file of the database; it is empty if the file is not there (default place)")
    parser.add_argument("--wait", action="store_true", help="wait for a line of input before CUDA is touched")
    parser.add_argument("--turns", action="store_true", help="compare the host's time with and without ucudnn by turns")
    parser.add_argument("--lock", type=Path, help="file that is locked while this process measures")
    return parser


if __name__ == "__main__":
    run_main(main)
