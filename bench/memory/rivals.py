"""One training step in less memory by every way that PyTorch has, and by ours: time against measured peak.

    python -m bench.memory.rivals                                  # ResNet-50, a U-Net and GPT-2 medium, an H200
    python -m bench.memory.rivals --network vgg16_bn --rival eager --rival ours --share 0.5
    python -m bench.memory.rivals --show --picture pictures        # what is kept, as tables, and as pictures
    python -m bench.memory.rivals --device cpu --small --out trial.json     # tries the script out

Rivals: eager; blocks by `torch.utils.checkpoint`; `save_on_cpu`; gradient accumulation, where no batch normalization
forbids it; `torch.compile`, with `activation_memory_budget`, and with activation offloading; and `fit` within shares of
the memory of eager's process, whole, divided and compiled. No step has dropout, because `activation_memory_budget`
draws it twice. A peak is `max_memory_allocated` of the timed steps. What a process has is its context and kernels, and
all that PyTorch's allocator has taken.

Each rival is a process of its own. Its settings share it, because cuDNN's trials of algorithms take 12 to 17 s there.
Processes trace, plan and compile beside each other, but take turns on the device, and while one times its steps all
others are stopped. What `torch.compile` makes is compiled by as many processes as there are CPUs to spare, into one
cache, before its own process begins. A cell that the file has is not measured again, unless --again says so.
"""

import multiprocessing
import os
import signal
import threading
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from bench.memory import rival_table as names
from bench.memory.compared_models import GPTS
from bench.memory.record_steps import RECIPES, recipe
from bench.memory.rival_steps import Asked, serve
from bench.memory.rival_table import Cell
from bench.tools.results import load, save_case
from bench.tools.script import command_line, note, run_main
from ucudnn.memory.torch.comparison.trial import ENDED
from ucudnn.memory.torch.comparison.trial_process import process_of, received
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe
from ucudnn.networks.variants import Variant
from ucudnn.problem import DataType

_MODELS = "bench.memory.compared_models"
LAST = Variant(channels_last=True)
_GPT = recipe("gpt2_medium", 8, (1024,), tokens=True, optimizer="adamw", loss=f"{_MODELS}:token_loss")
_GPT = replace(_GPT, autocast=DataType.BFLOAT16)
_EFFICIENT = recipe("efficientnet_v2_s", 64, (3, 300, 300), optimizer="adamw", variant=LAST)
NETWORKS: Mapping[str, TrainingRecipe] = {
    "resnet50_last": replace(RECIPES["resnet50"], variant=LAST),
    "unet2d_256": replace(RECIPES["unet2d"], batch=16, shape=(3, 256, 256)),
    **{name: replace(_GPT, model=f"{_MODELS}:{name}") for name in GPTS},
    "unet3d_instance": replace(RECIPES["unet3d"], model=f"{_MODELS}:unet3d_instance"),
    "vnet": replace(RECIPES["unet3d"], model=f"{_MODELS}:vnet", batch=2),
    "efficientnet_v2_s": replace(_EFFICIENT, model=f"{_MODELS}:efficientnet_v2_s"),
    **{name: each for name, each in RECIPES.items() if name not in ("alexnet", "vgg16")},
}
USUAL = ("resnet50_last", "unet2d_256", "gpt2_medium")
RATIOS = (0.5, 0.2, 0.0, 0.3, 0.1, 0.8, 0.4, 0.65)
SHARES = (0.9, 0.7, 0.5, 0.3)
RIVALS: dict[str, Sequence[float]] = dict.fromkeys(
    (names.EAGER, names.CHECKPOINT, names.COMPILE, names.SAVE_ON_CPU, names.UNBOUNDED), (0.0,)
)
RIVALS |= {
    names.OURS: SHARES,
    names.DIVIDED: SHARES[-1:],
    names.COMPILED: (1.0, *SHARES),
    names.ACCUMULATE: (2, 4),
    names.RATIO: RATIOS,
    names.OFFLOAD: (1, 0),
}
"""The settings of each rival."""
_COMPILED = (names.COMPILE, names.RATIO)
_FAMILIES = (
    (names.OURS,),
    (names.DIVIDED,),
    (names.COMPILED, names.UNBOUNDED),
    (names.ACCUMULATE,),
    (names.CHECKPOINT,),
    _COMPILED,
    (names.SAVE_ON_CPU,),
    (names.OFFLOAD,),
)
"""Those that share a process, in the order in which they begin."""
_RUNNERS = 4  # of which three may wait for compilers
_SPARE_CPUS = 5  # of the process on the device, its backward, and those that wait for their turn


def recipe_of(network: str, small: bool) -> TrainingRecipe:
    """Return what is trained."""
    found = NETWORKS[network]
    if not small:
        return found
    if found.tokens:
        return replace(found, batch=4, shape=(16,), model=f"{_MODELS}:gpt_small")
    side = 299 if network == "inception_v3" else 32 if len(found.shape) == 3 else 16
    return replace(found, batch=4, shape=(found.shape[0], *[side] * (len(found.shape) - 1)))


class Race:
    """Measures cells of a command line into a file, in processes that take turns on the device."""

    def __init__(self, arguments: Namespace, out: Path) -> None:
        self._arguments, self._out = arguments, out
        self._until = monotonic() + arguments.seconds
        self._device = threading.Lock()
        self._kept: dict[str, Any] = {} if arguments.again else dict(kept_cells(out))
        self._compilers = max(1, (os.cpu_count() or 1) - _SPARE_CPUS)

    def run(self, networks: Sequence[str], rivals: Mapping[str, Sequence[float]]) -> None:
        """Measure what is missing, eager of all networks first, because budgets are shares of its memory."""

        def cells(network: str, family: Sequence[str]) -> list[Cell]:
            every = (Cell(network, rival, each) for rival in family for each in rivals.get(rival, ()))
            chosen = self._arguments.cell
            return [each for each in every if str(each) not in self._kept and (not chosen or str(each) in chosen)]

        with ThreadPoolExecutor(self._compilers) as compilers, ThreadPoolExecutor(_RUNNERS) as runners:
            warming: dict[str, list[Future[None]]] = {}
            for network in networks:
                each_alone = ([each] for each in cells(network, _COMPILED))
                warming[network] = [compilers.submit(self._family, alone, warms=True) for alone in each_alone]
            wait([runners.submit(self._family, [Cell(network, names.EAGER)]) for network in networks])
            running = [
                runners.submit(
                    self._family, cells(network, family), after=warming[network] if family == _COMPILED else ()
                )
                for family in _FAMILIES
                for network in networks
            ]
            for each in running:
                each.result()

    def _family(self, cells: Sequence[Cell], *, warms: bool = False, after: Sequence[Future[None]] = ()) -> None:
        """Measure cells one after another in one process, behind those that compile; in a new one if it ends."""
        wait(after, max(0.0, self._until - monotonic()))
        left = [each for each in cells if str(each) not in self._kept]
        while left and monotonic() < self._until:
            with process_of(serve) as connection:
                while left and monotonic() < self._until:
                    cell = left.pop(0)
                    answer, ended = self._told(connection, self._asked(cell, warms=warms))
                    if not warms:
                        self._keep(cell, answer)
                    if ended:
                        break

    def _asked(self, cell: Cell, *, warms: bool) -> Asked:
        """Return what a process is asked; without eager's memory the budget is 0, which no plan keeps."""
        given = self._arguments
        process = kept_cells(self._out).get(str(Cell(cell.network, names.EAGER)), {}).get("process", 0)
        budget = int(process * cell.setting) if cell.rival in names.WITHIN else None
        ran = {"device": given.device, "steps": given.steps, "policy": given.policy, "budget": budget}
        recipe = recipe_of(cell.network, given.small)
        return Asked(cell=cell, recipe=recipe, warms=warms, **ran)

    def _told(self, connection: Connection, asked: Asked) -> tuple[dict[str, Any], bool]:
        """Return the answer of a process, to which turns are given meanwhile, and whether the process has ended."""
        has_device, stopped = False, list[int]()
        try:
            connection.send(asked)
            while True:
                most = self._arguments.cell_seconds
                if not connection.poll(min(most, max(0.0, self._until - monotonic())) if asked.warms else most):
                    return {"reason": f"it took more than {most:g} s"}, True
                message = received(connection)
                if isinstance(message, dict):
                    return message, False
                if isinstance(message, int):  # it is about to time its steps
                    stopped = _others(message)
                    _signal(stopped, signal.SIGSTOP)
                elif message == "take":
                    has_device = self._device.acquire()
                elif message == "give":
                    self._device.release()
                    has_device = False
                else:
                    _signal(stopped, signal.SIGCONT)
                connection.send(None)
        except (EOFError, OSError):
            return {"reason": ENDED}, True
        finally:
            _signal(stopped, signal.SIGCONT)
            if has_device:
                self._device.release()

    def _keep(self, cell: Cell, answer: dict[str, Any]) -> None:
        allocator, small = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""), self._arguments.small
        row = {**cell._asdict(), **answer, "batch": recipe_of(cell.network, small).batch, "allocator": allocator}
        self._kept[str(cell)] = row
        save_case(self._out, str(cell), row)
        found = f"{row['step_ms']:.1f} ms" if "step_ms" in row else row["reason"]
        note(f"{self._until - monotonic():6.0f} s left, {cell}: {found}")


def _others(pid: int) -> list[int]:
    """Return the processes that this one has started beside one of them."""
    return [each.pid for each in multiprocessing.active_children() if each.pid not in (None, pid)]


def _signal(pids: Sequence[int], what: signal.Signals) -> None:
    """Signal processes and those that compile for them."""
    for pid in pids:
        for send in (os.killpg, os.kill):  # one that has only begun leads no group yet
            with suppress(ProcessLookupError):
                send(pid, what)
                break


def kept_cells(path: Path) -> Mapping[str, Any]:
    """Return the cells that are kept."""
    return load(path)["cases"] if path.exists() else {}


def show(path: Path, networks: Sequence[str], pictures: Path | None) -> None:
    """Print what is kept, and draw it into a folder."""
    cases = kept_cells(path)
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
    for network in networks:
        names.print_rows([names.HEADINGS, *names.lines(cases, network)])
        if pictures is not None and any("step_ms" in each for each in cases.values() if each["network"] == network):
            names.draw(cases, network, pictures / f"rivals-{network}.svg")


def main() -> None:
    """Measure what is missing, print all, and draw it."""
    parser = command_line(__doc__, __spec__.name, "memory/rivals.json")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="(%(default)s)")
    parser.add_argument("--small", action="store_true", help="small inputs, to try the script out")
    parser.add_argument("--network", action="append", choices=NETWORKS, help=f"may be repeated ({' '.join(USUAL)})")
    parser.add_argument("--rival", action="append", choices=RIVALS, help="may be repeated (all)")
    parser.add_argument("--share", action="append", type=float, help=f"of eager's memory, for ours {SHARES}")
    parser.add_argument("--ratio", action="append", type=float, help=f"of activation_memory_budget {RATIOS}")
    parser.add_argument("--cell", action="append", help="such as 'vgg16_bn ours 0.5', of those above (all)")
    parser.add_argument("--policy", default="auto", help="of ours (%(default)s)")
    parser.add_argument("--compiled-share", action="append", type=float, help="like --share, of ours compiled")
    parser.add_argument("--divided-share", action="append", type=float, help="like --share, of ours divided")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of at most 3 s, at least 3 (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1e9, help="when to begin no further cell")
    parser.add_argument("--cell-seconds", type=float, default=240.0, help="most seconds of a cell (%(default)s)")
    parser.add_argument("--again", action="store_true", help="measure cells that are kept again")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    parser.add_argument("--picture", type=Path, help="folder of pictures of time by peak")
    arguments = parser.parse_args()
    if arguments.small and arguments.out is None:
        parser.error("--small tries the script out: name a file with --out")
    out, networks = arguments.out or arguments.default_out, arguments.network or USUAL
    shares = {names.OURS: arguments.share, names.DIVIDED: arguments.divided_share}
    shares[names.COMPILED] = arguments.compiled_share
    given = {each: sorted(named, reverse=True) for each, named in shares.items() if named}
    given |= {names.RATIO: [*(arguments.ratio or RATIOS)]}
    rivals = {each: given.get(each, RIVALS[each]) for each in (arguments.rival or RIVALS)}
    if not arguments.show:
        with TemporaryDirectory() as cache:
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
            os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
            Race(arguments, out).run(networks, rivals)
    show(out, networks, arguments.picture)


if __name__ == "__main__":
    run_main(main)
