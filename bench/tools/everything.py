"""Runs the benchmarks on the GPUs of this machine, several at a time, and goes on where it was stopped.

    python bench/everything.py --list                                       what there is, with about how long it takes
    python bench/everything.py --devices 0,1 --out /tmp/results             all of it: a good hour on two H200s
    python bench/everything.py --only 'torch_*' --only benchmarking --out /tmp/results
    python bench/everything.py --seconds 900 --out /tmp/results             again and again, until nothing is left

Each job is a script of bench/, with the GPUs that it needs to itself and their share of the CPU's cores; what it writes
and prints goes into the folder --out, from where it can be copied to bench/results. Nothing is begun that would not
end in time. A job that ended well is not run again, unless its mark in done.json is taken away; one that failed or was
stopped is. Those of peers share their pairs, one process on each GPU, and measure what bench/results/peers.json lacks,
or with --again what it has as well; `peers.py --merge` puts together what they wrote.
"""

import json
import os
import signal
import subprocess
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from math import inf
from pathlib import Path
from shutil import copyfile
from time import monotonic, sleep

BENCH = Path(__file__).parent
RESULTS = BENCH / "results"
PATIENCE = 2.0  # times as long as a job takes about, and
GRACE = 30.0  # seconds, after which it is stopped
LEAST = 150.0  # seconds in which one that resumes gets something done, and
LAST = 60.0  # for what it has in hand
DATABASE = "UCUDNN_DATABASE"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One script.

    Attributes:
        name: of the job, and of the files that it writes.
        seconds: which it takes about on an H200, as far as is known.
        command: the script and its arguments; '{out}' is the folder, '{gpus}' the numbers of its GPUs.
        gpus: how many it needs.
        resumes: whether it goes on where it was; it is told --seconds.
        completes: a file of bench/results, and the one in the folder that begins as its copy; None for none.
        environment: of the process, besides.
    """

    name: str
    seconds: float
    command: str
    gpus: int = 1
    resumes: bool = False
    completes: tuple[str, str] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def jobs(gpus: int, *, again: bool = False) -> list[Job]:
    """Return all jobs, those first whose times depend most on the host; `again` is for what peers measured before."""
    figures = "--backend cudnn --out {out}"
    off, adaptive = {DATABASE: "off"}, {DATABASE: "off", "UCUDNN_BATCH_SIZE_POLICY": "adaptive"}
    several = [
        Job(
            name="devices",
            seconds=110,
            gpus=2,
            command="benchmarking.py --devices 0,1 --out {out}/benchmarking_devices.json",
        )
    ]
    peers = "peers.py --all --claims {out}/claims --database {out}/peers{gpus}.db --out {out}/peers{gpus}.json"
    peers += " --again" if again else ""
    return [
        *(several if gpus > 1 else ()),
        Job(name="benchmarking", seconds=220, command="benchmarking.py --out {out}/benchmarking.json"),
        Job(
            name="torch_step_adaptive",
            seconds=235,
            command="torch_step.py --bounded --out {out}/torch_step_adaptive.json",
            environment=adaptive,
        ),
        Job(
            name="torch_step",
            seconds=105,
            command="torch_step.py --bounded --out {out}/torch_step.json",
            environment=off,
        ),
        Job(
            name="torch_overhead",
            seconds=20,
            command="torch_overhead.py --out {out}/torch_overhead.json",
            environment=off,
        ),
        Job(name="overhead", seconds=60, command="overhead.py --out {out}/overhead.json", environment=off),
        Job(name="torch_losses", seconds=600, command="torch_losses.py --out {out}/torch_losses.json", environment=off),
        Job(
            name="torch_samples",
            seconds=75,
            command="torch_samples.py --out {out}/torch_samples.json",
            environment=off,
        ),
        Job(
            name="torch_memory",
            seconds=660,
            command="torch_memory.py --tolerance 2GiB --steps 3 --resume --out {out}/torch_memory.json",
        ),
        Job(name="accuracy", seconds=120, command="accuracy.py --out {out}/accuracy.json", environment=off),
        Job(name="execute", seconds=70, command="execute.py --out {out}/execute.json"),
        Job(name="copies", seconds=15, command="copies.py --out {out}/copies.json"),
        Job(name="copies16", seconds=15, command="copies.py --dtype float16 --out {out}/copies_float16.json"),
        Job(name="volume", seconds=60, command="volume.py --out {out}/volume.json"),
        Job(name="slabs", seconds=240, command="slabs.py --out {out}/slabs.json"),
        Job(name="division", seconds=290, command="division.py --backend cudnn --out {out}/division_executed.json"),
        *(
            Job(name=f"figure{number}", seconds=seconds, command=f"figure{number}.py {figures}")
            for number, seconds in ((1, 40), (8, 30), (9, 60), (10, 150), (11, 145), (12, 65))
        ),
        Job(name="deepbench", seconds=170, command=f"deepbench.py {figures} --repeats 3"),
        *(
            Job(
                name=f"peers {number}",
                seconds=5000 / gpus,
                command=peers,
                resumes=True,
                completes=("peers.json", "peers{gpus}.json"),
            )
            for number in range(gpus)
        ),
    ]


class Machine:
    """GPUs with their shares of the CPU's cores.

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
        """Return so many free GPUs, or none where there are fewer."""
        taken = self._free[:count] if count <= len(self._free) else []
        self._free = self._free[len(taken) :]
        return taken

    def give_back(self, devices: Sequence[int]) -> None:
        """Let others have them."""
        self._free = sorted({*self._free, *devices})

    def cores(self, devices: Iterable[int]) -> set[int]:
        """Return the cores that go with some GPUs."""
        return set().union(*(self._cores[device] for device in devices))


@dataclass(kw_only=True)
class Running:
    """A job that runs."""

    job: Job
    process: subprocess.Popen[bytes]
    devices: list[int]
    begin: float


class Runner:
    """Runs jobs on a machine, and keeps in a folder which ended well.

    Args:
        machine: what they run on.
        folder: where they write.
        until: time of `monotonic` after which nothing is to run.
    """

    def __init__(self, machine: Machine, folder: Path, until: float) -> None:
        self._machine = machine
        self._folder = folder
        self._until = until
        self._marks = folder / "done.json"
        self._running: list[Running] = []

    def done(self) -> dict[str, float]:
        """Return the seconds that each job took that ended well."""
        return json.loads(self._marks.read_text()) if self._marks.exists() else {}

    def run(self, wanted: Sequence[Job]) -> list[Job]:
        """Run jobs in their order; return those that did not end well."""
        self._folder.mkdir(parents=True, exist_ok=True)
        done = self.done()
        waiting = [job for job in wanted if job.name not in done]
        try:
            while self._running or waiting:
                left = self._until - monotonic()
                waiting = [job for job in waiting if (LEAST if job.resumes else job.seconds) <= left]
                while waiting and (devices := self._machine.take(waiting[0].gpus)):
                    self._begin(waiting.pop(0), devices)  # in order: what needs several is not overtaken for ever
                self._look()
                sleep(0.1)
        finally:
            for each in self._running:  # whatever ends this, nothing goes on behind its back
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
                copyfile(known, own)
        environment = {**os.environ, **job.environment, "CUDA_VISIBLE_DEVICES": numbers, "PYTHONUNBUFFERED": "1"}
        if job.resumes and self._until < inf:
            command += ["--seconds", f"{self._until - monotonic() - LAST:.0f}"]
        cores = self._machine.cores(devices)
        with (self._folder / f"{job.name}.txt").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, BENCH / command[0], *command[1:]],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),  # of this one thread's program
            )
        self._running.append(Running(job=job, process=process, devices=devices, begin=monotonic()))
        note(f"{job.name}: begins on GPU {numbers}")

    def _look(self) -> None:
        for each in list(self._running):
            taken = monotonic() - each.begin
            if (
                each.process.poll() is None
                and monotonic() < self._until
                and taken < PATIENCE * each.job.seconds + GRACE
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


def note(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)


def parsed() -> Namespace:
    """Return the command line."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the jobs, and end")
    parser.add_argument("--only", action="append", help="names of jobs, also with * and ?; may be repeated")
    parser.add_argument("--devices", default="0", help="numbers of the GPUs, such as 0,1 (%(default)s)")
    parser.add_argument("--seconds", type=float, default=inf, help="end after so long")
    parser.add_argument("--again", action="store_true", help="peers: also what bench/results/peers.json has already")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of what they write (./%(default)s)")
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
    """Run what is wanted, say what is left, and return whether nothing is."""
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
    sys.exit(0 if main() else 1)
