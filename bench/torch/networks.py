"""Compares whole networks under all settings: their steps, first steps and peaks, with ucudnn and without.

    python -m bench.torch.networks                                 four networks; continues where it was stopped
    python -m bench.torch.networks --limit-seconds 540             starts nothing that might not end in time
    python -m bench.torch.networks --network all --form all --repeats 3 --gpus 2
    python -m bench.torch.networks --row vgg16:bf16 --row unet3d:last --setting stock --setting auto
    python -m bench.torch.networks --summary                       what is kept, losers first, and how much is left
    python -m bench.torch.networks --picture networks.png          a picture of what is kept

Each cell is a network, a form, a setting and a repeat. It runs in a process of its own, `bench.torch.network_cell`.
What is worth most comes first: all repeats of stock and auto of a network in a form, before the next one begins; then
the same without cudnn.benchmark, and then limits. What lacks the fewest cells goes before what is not begun. Settings
alternate. All cells of a network in a form run on one GPU. Other networks run on other GPUs at the same time.

PyTorch alone is measured again with what is compared with it, and the other way round, unless the two ended within half
an hour: another machine may have a slower host.

No cell starts that might not end in the time that is left, by what it took last and a quarter more, or by what cells of
its setting took. Stock and auto of a network start together or not at all. Smaller cells fill the time.

While a process measures, the next two of its GPU import PyTorch and make their models on the CPU, with one thread each,
on processors of their own (--preparing-cores). The other processors are divided among the GPUs. The next process opens
CUDA once the one before it has answered, and does nothing else until that has ended. --alone starts no process before
the last one has ended. The libraries of CUDA are read before the first cell of a call, whose first step would wait for
the disk otherwise.

Each process begins with an empty database. With --keep-databases repeats in the same call take the database that the
first one has left, as the second run of a user does, and settle sooner. A cell says which it was: first steps and the
time that trials lost count only where the database was empty. The first repeat alone compares the host's time by turns.

Each cell is kept as soon as it ends, with the commit and a digest of the code that its process ran, whose files are
kept beside it (`networks_code.json`). A cell whose code has changed is measured again:
what computes a step or chooses for it, and not comments, reports or other networks. A cell that ended in an error is
not, without --again.
"""

import os
import signal
import sys
import tempfile
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic, time
from typing import Any

import torch

from bench.tools.processors import for_preparing, move, shares
from bench.tools.read_ahead import MOST_READING_S, libraries, read_ahead
from bench.tools.results import load, save_case
from bench.tools.script import add_commit, command_line, commit_of, note, out_of, run_main
from bench.torch import network_code
from bench.torch.network_order import Cell, Durations, groups, progress, together
from bench.torch.network_process import CellProcess
from bench.torch.network_setting import SETTINGS
from bench.torch.network_step import FORMS, NETWORKS, TRIAL
from bench.torch.network_summary import comparisons, draw, show

FIRST = ("resnet50", "efficientnet_b0", "regnety_032", "convnext_tiny")
_AHEAD = 2
"""Processes that are prepared while one measures: to prepare may take longer than to measure."""

_LOOK_S = 0.2  # between looks at signals


def cells(arguments: Namespace) -> Iterator[Cell]:
    """Yield the cells in the order of their processes, in which settings alternate."""
    settings = arguments.setting or list(SETTINGS)
    for network, form in arguments.row or rows(arguments.network, arguments.form):
        for repeat in range(arguments.repeats):
            for setting in reversed(settings) if repeat % 2 else settings:
                yield Cell(network, form, setting, repeat)


def rows(networks: Sequence[str] | None, forms: Sequence[str] | None) -> Iterator[tuple[str, str]]:
    """Yield each network in each form; 'all' stands for all of them, None for those of a first call."""
    every = [each for each in NETWORKS if each != TRIAL]
    for network in every if networks == ["all"] else networks or FIRST:
        for form in FORMS if forms == ["all"] else forms or list(FORMS)[:1]:
            yield network, form


def row(text: str) -> tuple[str, str]:
    """Return the network and the form of a row, such as 'vgg16:bf16'.

    Raises:
        ArgumentTypeError: if there is none such.
    """
    network, _, form = text.partition(":")
    if network not in NETWORKS or form not in FORMS:
        raise ArgumentTypeError(f"{text}: give NETWORK:FORM, of {', '.join(NETWORKS)} and {', '.join(FORMS)}")
    return network, form


def code_path(out: Path) -> Path:
    """Return the file that keeps the digests of files, beside a file of cells."""
    return out.with_name(f"{out.stem}_code.json")


def visible(count: int) -> list[str]:
    """Return how CUDA_VISIBLE_DEVICES names the first GPUs of this call, or their numbers if it does not say which.

    Raises:
        SystemExit: if it names fewer.
    """
    said = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    seen = [each for each in said.split(",") if each] or [str(gpu) for gpu in range(count)]
    if len(seen) < count:
        raise SystemExit(f"error: --gpus {count}: CUDA_VISIBLE_DEVICES={said} names only {len(seen)}")
    return seen[:count]


def lock_path(device: str) -> Path:
    """Return the file that is locked while a process measures on a GPU, which calls of other GPUs do not wait for."""
    return Path(tempfile.gettempdir()) / f"ucudnn-networks-{os.getuid()}-{device.replace('/', '-')}.lock"


def kept(path: Path | None) -> Mapping[str, Any]:
    """Return the cells that are kept."""
    found: Mapping[str, Any] = load(path)["cases"] if path is not None and path.exists() else {}
    return found


def void(out: Path | None) -> dict[str, list[str]]:
    """Return the cells whose code has changed since, and which parts of it; no parts where they are not known."""
    known = {} if out is None else kept(code_path(out))
    parts = {digest: network_code.changed(code) for digest, code in known.items()}
    found = {name: parts.get(case["digest"]) for name, case in kept(out).items()}
    return {name: each or [] for name, each in found.items() if each != []}


def missing(arguments: Namespace, out: Path, stale: Collection[str]) -> list[Cell]:
    """Return the cells that are to be measured; those whose code has changed are given."""
    known = {name: case for name, case in kept(out).items() if name not in stale}
    failed = set() if arguments.again else {name for name, case in known.items() if "error" in case}
    every = [cell for cell in cells(arguments) if str(cell) not in failed]
    todo = [cell for cell in every if str(cell) not in known or "error" in known[str(cell)]]
    return together(todo, every, {name: case.get("ended_unix_s", 0) for name, case in known.items()}, time())


class Measuring:
    """Measures the cells that are missing, as long as there is time, with one thread for each GPU.

    Args:
        arguments: command line.
        out: file of the cells.
        folder: empty folder for databases.
        cores: processors on which the processes of each GPU measure; empty if they need not be moved.
    """

    def __init__(self, arguments: Namespace, out: Path, folder: Path, cores: Sequence[Collection[int]] = ()) -> None:
        self._arguments = arguments
        self._out = out
        self._folder = folder
        self._cores = cores
        self._devices = visible(arguments.gpus)
        self._begin = monotonic()
        self._stale = set(void(out))
        todo = missing(arguments, out, self._stale)
        self._every = list(cells(arguments))
        self._left = set(todo)
        self._groups = groups(todo)
        self._gpus: dict[tuple[str, str], int] = {}  # of networks and forms
        self._durations = Durations(kept(out), arguments.cell_seconds)
        self._commit = commit_of(arguments)
        self._lock = Lock()
        self._ended = Event()
        self._running: set[CellProcess] = set()
        self._reading = None if arguments.backend == "cpu" else read_ahead(libraries(Path(torch.__file__).parent))
        self._keeper = ThreadPoolExecutor(1)  # so that no GPU waits until a large file is written

    def run(self) -> None:
        """Measure, until all is done, time is up, or an exception such as that of Ctrl-C ends this thread's wait."""
        ended: list[Event] = []
        try:
            for gpu in range(self._arguments.gpus):
                end = Event()
                Thread(target=self._lane_until, args=(gpu, end), daemon=True).start()
                ended.append(end)
            for each in ended:
                # Not Thread.join: if a signal's exception ends it, Python 3.11 takes the thread for ended. And a wait
                # without an end would let no signal in.
                while not each.wait(_LOOK_S):
                    pass
            self._keeper.shutdown()
            if self._left and not self._ended.is_set():
                note(f"{self._seconds_left():.0f} s are left, too few for {self._rest()}: call again")
        finally:
            self._ended.set()
            with self._lock:
                running = list(self._running)
            for process in running:
                process.kill()
            for each in ended:
                each.wait()
            self._keeper.shutdown()
            for process in list(self._running):  # whose lane has failed
                self._end(process)

    def _lane_until(self, gpu: int, ended: Event) -> None:
        """Measure cells on one GPU, and say when that has ended."""
        try:
            self._lane(gpu)
        finally:
            ended.set()

    def _lane(self, gpu: int) -> None:
        """Measure cells on one GPU."""
        mine: deque[Cell] = deque()
        ready: deque[CellProcess] = deque()
        while not self._ended.is_set():
            self._prepare(ready, mine, gpu, 1)
            if not ready:
                return
            present = ready.popleft()
            if not self._fits([present.cell], 0):
                self._end(present)
                continue
            if not self._arguments.alone:
                self._prepare(ready, mine, gpu, _AHEAD, self._durations.of(present.cell))
            self._measure(present, gpu)
        for each in ready:
            self._end(each)

    def _prepare(self, ready: deque[CellProcess], mine: deque[Cell], gpu: int, count: int, before_s: float = 0) -> None:
        """Start processes, which wait, until there are so many; `before_s` is what comes before them, in seconds."""
        while len(ready) < count and not self._ended.is_set():
            if not mine:
                mine.extend(self._group(gpu, before_s + sum(self._durations.of(each.cell) for each in ready)))
            if not mine:
                return
            ready.append(self._start(mine.popleft(), gpu))

    def _group(self, gpu: int, before_s: float) -> list[Cell]:
        """Return the first group that can end in time and that no other GPU takes; no cells if there is none."""
        with self._lock:
            for group in self._groups:
                if self._gpus.get(group[0][:2], gpu) == gpu and self._fits(group, before_s):
                    self._gpus[group[0][:2]] = gpu
                    self._groups.remove(group)
                    return group
        return []

    def _fits(self, group: list[Cell], before_s: float) -> bool:
        """Whether cells can end in time, if they begin after some seconds."""
        *others, last = group
        spent = before_s + sum(self._durations.of(each) for each in others)
        return spent + self._durations.most(last) <= self._seconds_left()

    def _seconds_left(self) -> float:
        return float(self._arguments.limit_seconds - (monotonic() - self._begin))

    def _start(self, cell: Cell, gpu: int) -> CellProcess:
        """Start the process of a cell, which waits."""
        arguments = self._arguments
        command = [sys.executable, "-m", "bench.torch.network_cell", "--network", cell.network, "--form", cell.form]
        command += ["--setting", cell.setting, "--backend", arguments.backend, "--steps", str(arguments.steps)]
        command += ["--tuning-seconds", str(arguments.tuning_seconds), "--database", str(self._database(cell))]
        device = self._devices[gpu]
        command += ["--wait", "--lock", str(lock_path(device)), *["--turns"] * (cell.repeat == 0)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device}
        if self._cores:
            environment.setdefault("OMP_NUM_THREADS", str(len(self._cores[gpu])))  # not those on which it prepares
        process = CellProcess(cell, command, environment)
        with self._lock:
            self._running.add(process)
        return process

    def _database(self, cell: Cell) -> Path:
        repeat = "" if self._arguments.keep_databases else f"-{cell.repeat}"
        return self._folder / f"{cell.network}-{cell.form}-{cell.setting}{repeat}.sqlite"

    def _measure(self, process: CellProcess, gpu: int) -> None:
        """Let a process measure, and let its answer be kept; it may still be ending afterwards."""
        prepared: list[int] = []
        with suppress(OSError):  # it has ended already
            prepared = sorted(os.sched_getaffinity(process.pid))  # it may still import, so it cannot say this itself
        if self._cores:
            move(process.pid, self._cores[gpu])
        if self._reading is not None:
            self._reading.join(MOST_READING_S)
            self._reading = None
        begin, seconds = monotonic(), min(self._seconds_left(), self._arguments.cell_seconds)
        answer = process.measure(seconds)
        taken = monotonic() - begin
        if answer is None or (self._ended.is_set() and "error" in answer):
            self._end(process)
            if self._ended.is_set() or seconds < self._arguments.cell_seconds:
                note(f"{process.cell}: ended before it was done, and not kept")
                return
            answer = {"error": f"not done after {seconds:.0f} s"}
        if self._arguments.alone:
            self._reap(process)
        if "error" in answer:
            self._database(process.cell).unlink(missing_ok=True)
        else:
            answer["cores"]["prepared"] = prepared
        self._keeper.submit(self._keep, process, {"gpu": gpu, "process_s": taken, **answer})

    def _keep(self, process: CellProcess, answer: dict[str, Any]) -> None:
        """Write the answer of a cell into the file, and say what it was."""
        cell = process.cell
        try:
            files = answer.pop("code", None) or network_code.whole(cell.setting, self._arguments.backend)
            code = network_code.digests(cell.network, files)
            digest, seconds = network_code.digest(code), answer["process_s"]
            save_case(code_path(self._out), digest, code)
            ended = {"commit": self._commit, "digest": digest, "ended_unix_s": int(time())}
            save_case(self._out, str(cell), ended | answer)
        except OSError as error:
            note(f"error: {cell} cannot be kept: {error}")
            self._ended.set()
            self._reap(process)
            return
        told = answer.get("error") or f"step {answer['step_ms']:.2f} ms, first {answer['first_step_s']:.2f} s"
        if "error" not in answer:
            self._durations.learn(cell, seconds)
        with self._lock:
            self._left.discard(cell)
        self._stale.discard(str(cell))
        self._reap(process)
        note("; ".join([f"{cell}: {told}", *self._ratios(cell), f"process {seconds:.0f} s", f"left: {self._rest()}"]))

    def _ratios(self, cell: Cell) -> Iterator[str]:
        """Yield the ratios in which a cell takes part, as far as they are known."""
        known = {name: case for name, case in kept(self._out).items() if name not in self._stale}
        for each in comparisons({name: known[name] for name in known if name.split()[:2] == list(cell[:2])}):
            benchmark = cell.setting.endswith("-off") != each.benchmark
            if cell.setting == each.setting or (cell.setting.startswith("stock") and benchmark):
                yield f"{each.setting} {each.ratio:.3f} of stock ({len(each.stock)}, {len(each.ours)})"

    def _rest(self) -> str:
        """Return how many cells are left, and an estimate of the time that they take."""
        with self._lock:
            seconds = sum(self._durations.of(each) for each in self._left)
            about = f"{len(self._left)} cells of about {seconds / self._arguments.gpus:.0f} s"
            return f"{about}; {progress(self._every, self._left)}"

    def _end(self, process: CellProcess) -> None:
        process.kill()
        self._reap(process)

    def _reap(self, process: CellProcess) -> None:
        process.reap()
        with self._lock:
            self._running.discard(process)


def measure(arguments: Namespace, out: Path) -> None:
    """Measure the cells that are missing, as long as there is time."""

    def end(number: int, _: object) -> None:
        raise SystemExit(f"error: signal {number}")

    signal.signal(signal.SIGTERM, end)
    all_cores = os.sched_getaffinity(0)
    preparing = for_preparing(all_cores, arguments.preparing_cores)
    with tempfile.TemporaryDirectory(prefix="ucudnn-networks-") as folder:
        if preparing:
            os.sched_setaffinity(0, preparing)  # processes inherit it until it is their turn
        try:
            measuring = shares(all_cores - preparing, arguments.gpus) if preparing else ()
            Measuring(arguments, out, Path(folder), measuring).run()
        finally:
            os.sched_setaffinity(0, all_cores)


def main() -> None:
    """Measure what is missing, and print the table."""
    arguments = _parser().parse_args()
    out = out_of(arguments)
    if not (arguments.summary or arguments.picture):
        if out is None:
            raise SystemExit("error: a trial keeps its cells in a file: give --out")
        measure(arguments, out)
    if arguments.picture:
        draw(kept(out), arguments.picture)
    stale = void(out)
    show(kept(out), stale)
    if arguments.summary and out is not None:
        durations = Durations(kept(out), arguments.cell_seconds)
        left = missing(arguments, out, stale)
        about = f"{len(left)} cells of about {sum(map(durations.of, left)):.0f} s"
        print(f"to be measured: {about}; {progress(cells(arguments), left)}")


def _parser() -> ArgumentParser:
    parser = command_line(__doc__, __spec__.name, "torch/networks.json")
    parser.add_argument("--backend", default="cudnn", help="cudnn, or cpu to try the script out (%(default)s)")
    parser.add_argument("--network", action="append", choices=(*NETWORKS, "all"), help="may be repeated (four of them)")
    parser.add_argument("--form", action="append", choices=(*FORMS, "all"), help="may be repeated (nchw)")
    parser.add_argument("--row", action="append", type=row, help="NETWORK:FORM in place of both; may be repeated")
    parser.add_argument("--setting", action="append", help=f"may be repeated ({', '.join(SETTINGS)})")
    parser.add_argument("--repeats", type=int, default=1, help="processes of each cell (%(default)s)")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs, each with networks of its own (%(default)s)")
    parser.add_argument("--alone", action="store_true", help="start no process while another one measures on its GPU")
    parser.add_argument("--again", action="store_true", help="measure again what ended in an error")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (%(default)s)")
    parser.add_argument("--tuning-seconds", type=float, default=30, help="most seconds of tuning (%(default)s)")
    parser.add_argument("--limit-seconds", type=float, default=1e9, help="most seconds of this call (no limit)")
    parser.add_argument("--cell-seconds", type=float, default=90, help="most seconds of a cell (%(default)s)")
    parser.add_argument("--keep-databases", action="store_true", help="repeats take the database of the first process")
    parser.add_argument("--preparing-cores", type=int, help="processors that prepare (an eighth of them; none of 7)")
    add_commit(parser)
    parser.add_argument("--summary", action="store_true", help="print the table of what is kept, and measure nothing")
    parser.add_argument("--picture", type=Path, help="draw what is kept into a file, and measure nothing")
    return parser


if __name__ == "__main__":
    run_main(main)
