"""Run the benchmarks on the GPUs of this machine, several at a time, and continue where an earlier call stopped.

    python -m bench.tools.everything --list                               list the jobs and their usual durations
    python -m bench.tools.everything --devices 0,1 --out /tmp/results     run all jobs: over an hour on two H200s
    python -m bench.tools.everything --only 'torch_*' --only benchmarking --out /tmp/results
    python -m bench.tools.everything --seconds 900 --out /tmp/results     repeat this until no job is left

A job is one script of bench/. It has its GPUs to itself, and their share of the CPU's cores. The folder --out receives
its output, and its results in the same folders as in bench/results, so that they can be copied there. A job does not
start if it would not end in time. A job that ended well is not run again, unless its mark in done.json is removed. A
job that failed or was stopped is run again. The peers jobs, one for each GPU, share the pairs of network and variant.
They measure what bench/results/peers/compare.json lacks; with --again they measure all pairs. Then
`bench.peers.compare --merge` combines their files.

No job: scripts of whole networks and budgets, which divide the GPUs or their time themselves (`bench.torch.networks`,
`bench.torch.programs.replacements`, `bench.memory.execution`), those that need files or programs besides this project
(`bench.torch.conformance`, `bench.caffe`), and further ones of bench/memory and bench/native.
"""

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from math import inf
from pathlib import Path
from shutil import copyfile
from time import monotonic, sleep
from typing import Any

from bench.tools.results import RESULTS, ROOT
from bench.tools.script import command_line, note, run_main

PATIENCE, GRACE_S = 2.0, 30.0
"""A job is stopped after this multiple of its usual duration and these seconds."""

LEAST_S = 150.0
"""Seconds below which a job that continues its earlier work is not started."""

LAST_S = 60.0
"""Seconds that such a job gets to finish what it measures when its time is up."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of one script.

    Attributes:
        name: name of the job and of the file with its output.
        seconds: usual duration on an H200.
        command: module and arguments; '{out}' stands for the folder, '{gpus}' for the numbers of the job's GPUs.
        gpus: number of GPUs.
        resumes: whether the script continues its earlier work and takes --seconds.
        completes: a file of bench/results and a file of the folder; the second starts as a copy of the first.
        environment: additional environment variables.
    """

    name: str
    seconds: float
    command: str
    gpus: int = 1
    resumes: bool = False
    completes: tuple[str, str] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


OFF = {"UCUDNN_DATABASE": "off"}
ADAPTIVE = {**OFF, "UCUDNN_BATCH_SIZE_POLICY": "adaptive"}
UNDIVIDED = {**OFF, "UCUDNN_BATCH_SIZE_POLICY": "undivided"}


def jobs(gpus: int, *, again: bool = False) -> list[Job]:
    """Return all jobs for a number of GPUs.

    The jobs whose times depend most on the host come first, while few processes run beside them.

    Args:
        gpus: number of GPUs.
        again: whether the peers jobs also measure what bench/results has.
    """
    several = [
        _job("gpu.benchmarking", 110, "--devices 0,1", name="devices", out="gpu/benchmarking_devices.json", gpus=2),
        _job("torch.programs.rank_training", 130, name="rank_training", out="torch/rank_training.json", gpus=2),
    ]
    return [
        *(several if gpus > 1 else []),
        _job("torch.programs.image_sizes", 90, name="image_sizes", out="torch/image_sizes.json"),
        _job("torch.programs.left_alone", 370, name="left_alone", out="torch/left_alone.json"),
        _job(
            "torch.programs.host_turns", 90, "--way passed --batch 16", name="host_turns", out="torch/host_turns.json"
        ),
        _job("torch.programs.trial_turns", 170, name="trial_turns", out="torch/trial_turns.json"),
        _job("gpu.benchmarking", 220),
        _job("torch.step", 235, "--bounded", name="torch_step_adaptive", environment=ADAPTIVE, adds=True),
        _job("torch.step", 105, "--bounded", environment=OFF, adds=True),
        _job("torch.step", 60, "--bounded", name="torch_step_undivided", environment=UNDIVIDED, adds=True),
        _job("torch.iterations", 300, environment=OFF, adds=True),
        _job("torch.overhead", 20, environment=OFF, adds=True),
        _job("torch.bias", 60, environment=OFF, adds=True),
        _job("gpu.overhead", 60, environment=OFF),
        _job("torch.losses", 600, environment=OFF),
        _job("torch.samples", 75, environment=OFF),
        _job("torch.memory", 600, "--steps 3 --cap 0 --cap 44GiB --cap 38GiB --cap 36GiB --cap 34GiB"),
        _job("gpu.accuracy", 120, environment=OFF),
        _job("gpu.execute", 70, adds=True),
        _job("gpu.copies", 15, adds=True),
        _job("gpu.copies", 15, "--dtype float16", name="copies_float16", adds=True),
        _job("gpu.volume", 60),
        _job("gpu.slabs", 240),
        _job("paper.division", 290, "--backend cudnn", out="paper/division_executed.json"),
        *(
            _job(f"paper.figure{number}", seconds, "--backend cudnn", out="paper")
            for number, seconds in ((1, 40), (8, 30), (9, 60), (10, 150), (11, 145), (12, 65))
        ),
        _job("paper.deepbench", 170, "--backend cudnn --repeats 3", out="paper"),
        *(_peers(number, gpus, again=again) for number in range(gpus)),
    ]


def _job(
    module: str,
    seconds: float,
    arguments: str = "",
    *,
    name: str = "",
    out: str = "",
    adds: bool = False,
    **attributes: Any,
) -> Job:
    """Return the job of a module of bench/.

    Args:
        module: module, without 'bench.'.
        seconds: usual duration.
        arguments: arguments of the script besides --out.
        name: name of the job; the module's last part, or 'torch_' and that part, by default.
        out: file or folder of the results, in the folder of results; 'FOLDER/MODULE.json' by default.
        adds: whether the script adds its cases or runs to those of the file.
        attributes: other attributes of the job.
    """
    folder, _, script = module.partition(".")
    path = out or f"{folder}/{script}.json"
    return Job(
        name=name or (f"torch_{script}" if folder == "torch" else script),
        seconds=seconds,
        command=" ".join([f"bench.{module}", *arguments.split(), f"--out {{out}}/{path}"]),
        completes=(path, path) if adds else None,
        **attributes,
    )


def _peers(number: int, gpus: int, *, again: bool) -> Job:
    """Return one of the jobs that share the pairs of network and variant."""
    path = "peers/compare{gpus}.json"
    files = f"--claims {{out}}/claims --database {{out}}/peers{{gpus}}.db --out {{out}}/{path}"
    return Job(
        name=f"peers {number}",
        seconds=5000 / gpus,
        command=f"bench.peers.compare --all {files}{' --again' if again else ''}",
        resumes=True,
        completes=("peers/compare.json", path),
    )


class Machine:
    """GPUs, each with a share of the CPU's cores.

    Args:
        devices: numbers of the GPUs.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // len(devices))
        self._cores = {
            device: set(cores[index * share :][:share]) or set(cores) for index, device in enumerate(devices)
        }
        self._free = list(devices)

    def take(self, count: int) -> list[int]:
        """Take a number of free GPUs; return none if fewer are free."""
        taken = self._free[:count] if count <= len(self._free) else []
        self._free = self._free[len(taken) :]
        return taken

    def give_back(self, devices: Sequence[int]) -> None:
        """Make GPUs free again."""
        self._free = sorted({*self._free, *devices})

    def cores(self, devices: Iterable[int]) -> set[int]:
        """Return the cores that belong to some GPUs."""
        return set().union(*(self._cores[device] for device in devices))


@dataclass(kw_only=True)
class Running:
    """A job whose process runs."""

    job: Job
    process: subprocess.Popen[bytes]
    devices: list[int]
    begin: float


class Runner:
    """Runs jobs on a machine and notes in done.json which ended well.

    Args:
        machine: the GPUs.
        folder: folder of output and results.
        until: time of `monotonic` at which every job must have ended.
    """

    def __init__(self, machine: Machine, folder: Path, until: float) -> None:
        self._machine = machine
        self._folder = folder
        self._until = until
        self._marks = folder / "done.json"
        self._running: list[Running] = []

    def done(self) -> dict[str, float]:
        """Return the duration in seconds of each job that ended well."""
        return json.loads(self._marks.read_text()) if self._marks.exists() else {}

    def run(self, wanted: Sequence[Job]) -> list[Job]:
        """Run jobs in their order; return the jobs that did not end well."""
        self._folder.mkdir(parents=True, exist_ok=True)
        done = self.done()
        waiting = [job for job in wanted if job.name not in done]
        try:
            while self._running or waiting:
                left = self._until - monotonic()
                waiting = [job for job in waiting if (LEAST_S if job.resumes else job.seconds) <= left]
                while waiting and (devices := self._machine.take(waiting[0].gpus)):
                    # No job overtakes the first, because a job that needs several GPUs would never get them.
                    self._begin(waiting.pop(0), devices)
                self._look()
                sleep(0.1)
        finally:
            for each in self._running:
                self._stop(each, "it was interrupted")
        done = self.done()
        return [job for job in wanted if job.name not in done]

    def _begin(self, job: Job, devices: list[int]) -> None:
        numbers = ",".join(map(str, devices))
        names = {"out": self._folder, "gpus": numbers.replace(",", "")}
        command = [each.format(**names) for each in job.command.split()]
        if job.completes is not None:
            known, own = RESULTS / job.completes[0], self._folder / job.completes[1].format(**names)
            if known.exists() and not own.exists():
                own.parent.mkdir(parents=True, exist_ok=True)
                copyfile(known, own)
        environment = {**os.environ, **job.environment, "CUDA_VISIBLE_DEVICES": numbers, "PYTHONUNBUFFERED": "1"}
        if job.resumes and self._until < inf:
            command += ["--seconds", f"{self._until - monotonic() - LAST_S:.0f}"]
        cores = self._machine.cores(devices)
        with (self._folder / f"{job.name}.txt").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )
        self._running.append(Running(job=job, process=process, devices=devices, begin=monotonic()))
        note(f"{job.name}: begins on GPU {numbers}")

    def _look(self) -> None:
        for each in list(self._running):
            taken = monotonic() - each.begin
            if (
                each.process.poll() is None
                and monotonic() < self._until
                and taken < PATIENCE * each.job.seconds + GRACE_S
            ):
                continue
            self._running.remove(each)
            if each.process.poll() is None:
                self._stop(each, "time is up")
            elif each.process.returncode:
                note(f"{each.job.name}: failed with {each.process.returncode}, see {each.job.name}.txt")
            else:
                note(f"{each.job.name}: {taken:.0f} s")
                self._marks.write_text(json.dumps({**self.done(), each.job.name: round(taken, 1)}, indent=1) + "\n")
            self._machine.give_back(each.devices)

    def _stop(self, each: Running, why: str) -> None:
        os.killpg(each.process.pid, signal.SIGKILL)
        each.process.wait()
        note(f"{each.job.name}: stopped, {why}")


def parsed() -> Namespace:
    """Return the command line."""
    parser = command_line(__doc__, __spec__.name)
    parser.add_argument("--list", action="store_true", help="print the jobs and end")
    parser.add_argument("--only", action="append", help="name of a job, or a pattern with * and ?; may be repeated")
    parser.add_argument("--devices", default="0", help="numbers of the GPUs, such as 0,1 (%(default)s)")
    parser.add_argument("--seconds", type=float, default=inf, help="end within this time")
    parser.add_argument("--again", action="store_true", help="peers: also measure what bench/results has")
    parser.add_argument(
        "--out", type=Path, default=Path("results"), help="folder of output and results (./%(default)s)"
    )
    options = parser.parse_args()
    try:
        options.devices = [int(each) for each in options.devices.split(",")]
    except ValueError:
        parser.error(f"--devices {options.devices}: give numbers, such as 0,1")
    options.jobs = jobs(len(options.devices), again=options.again)
    for text in options.only or ():
        if not any(fnmatch(job.name, text) for job in options.jobs):
            parser.error(f"--only {text}: there is {', '.join(job.name for job in options.jobs)}")
    if options.only:
        options.jobs = [job for job in options.jobs if any(fnmatch(job.name, text) for text in options.only)]
    return options


def main() -> bool:
    """Run the wanted jobs, print which are left, and return whether none is."""
    options = parsed()
    until = monotonic() + options.seconds
    if options.list:
        for job in options.jobs:
            print(f"{job.name:22} {job.seconds:5.0f} s  {job.gpus} GPU{'s' if job.gpus > 1 else ''}  {job.command}")
        return True
    left = Runner(Machine(options.devices), options.out.absolute(), until).run(options.jobs)
    if left:
        note(f"not done: {', '.join(job.name for job in left)}")
    return not left


if __name__ == "__main__":
    run_main(main)
