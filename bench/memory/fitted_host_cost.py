"""Time of the host for each operation of a fitted step, beside eager PyTorch: the price of running a memory plan.

    python -m bench.memory.fitted_host_cost     # on a CPU, with one thread and a C++ compiler: a minute

Networks are so narrow that the time of a step is the host's. Forward and backward run in turns, eager and by plans of
three policies; the median of many steps' processor times counts. What a fitted step takes beyond the eager one is
divided by the actions that its plan issues: operations, those that run again, copies and moves. Their own work is
included, so recomputation and copies look dearer than the host's part of them is. The last plan is the first one with
storages that move before most actions. There a move is compared with nothing, because eager PyTorch moves nothing.

A convolution that a plan chose for ucudnn is called on addresses, as on a GPU. The tests' stand-in for cuDNN returns at
once. The yardstick is an eager ReLU on tensors as small: PyTorch's own convolution takes the host longer, but without a
GPU it also computes. Of these the least of many samples counts: in most others malloc has returned new addresses, to
which calls are bound anew, where an allocator of a GPU returns those of the step before.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import process_time_ns

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from bench.memory.models import GPT, DenseNet
from bench.tools.results import save
from bench.tools.script import command_line, out_of, run_main, verdict
from bench.torch.gate_cost import idle_cudnn
from bench.torch.measuring import conditions
from tests.support.host_gpu import PROBLEM
from tests.support.moving_plans import shaken
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.benchmarking.unmeasured.untimed_division import equal_parts
from ucudnn.execution.plan import make_plan
from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.torch.convolutions.planned_convolution import PlannedConvolution
from ucudnn.memory.torch.convolutions.step_kernel import StepKernel
from ucudnn.memory.torch.running.fit import fit, fit_plan
from ucudnn.memory.torch.running.fitted_step import FittedStep
from ucudnn.memory.torch.subject.step_arguments import step_subject
from ucudnn.memory.torch.subject.traced_values import TracedTensor
from ucudnn.problem import Operation
from ucudnn.torch.device.gpu import TorchGpu

POLICIES = ("stock", "checkpoint", "vdnn-ext-all-p")
COUNTED = (ActionKind.RUN, ActionKind.RECOMPUTE, ActionKind.OFFLOAD, ActionKind.PREFETCH)
MOST_US = 3.0


def networks() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    """Return narrow networks with inputs and targets."""
    layers: list[nn.Module] = []
    for _ in range(100):
        layers += [nn.Linear(4, 4), nn.ReLU()]
    tokens = torch.randint(8, (1, 4))
    return {
        "200 layers": (nn.Sequential(*layers), (torch.randn(2, 4), torch.randint(4, (2,)))),
        "GPT": (GPT(12, 16, 2, length=4, vocabulary=8), (tokens, tokens)),
        "DenseNet": (DenseNet(2, (6, 12, 6), 4), (torch.randn(2, 3, 32, 32), torch.randint(1000, (2,)))),
    }


def begin() -> None:
    """Let a process compute in one thread, from the same random numbers."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


def timed(works: dict[str, Callable[[], object]], runs: int, calls: int = 1) -> dict[str, list[float]]:
    """Return the processor times of a call of each in microseconds; they take turns."""
    taken: dict[str, list[int]] = {name: [] for name in works}
    for _ in range(runs):
        for name, work in works.items():
            begin = process_time_ns()
            for _ in range(calls):
                work()
            taken[name].append(process_time_ns() - begin)
    return {name: [time / (1e3 * calls) for time in times] for name, times in taken.items()}


def fitted_steps(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, tuple[FittedStep, int, int]]:
    """Return the steps by name, each with its actions and the moves among them."""
    found = {}
    for policy in POLICIES:
        step = fit(model, inputs, loss=F.cross_entropy, policy=policy)
        found[policy] = step, sum(kind in COUNTED for kind, _ in step.plan.actions), 0
    stock, actions, _ = found["stock"]
    plan = shaken(stock.plan, stock.costs, 0)
    moves = sum(len(each.storages) for several in plan.moves.values() for each in several)
    step = fit_plan(step_subject(model, inputs, F.cross_entropy, None), stock._run.program, plan, stock.costs)
    found["stock, moving"] = step, actions + moves, moves
    return found


def measure(name: str, runs: int) -> list[dict[str, object]]:
    """Return a row for each plan of a network."""
    begin()
    model, inputs = networks()[name]

    def eager() -> None:
        F.cross_entropy(model(*inputs[:-1]), inputs[-1]).backward()
        model.zero_grad()

    works: dict[str, Callable[[], object]] = {"eager": eager}
    steps = fitted_steps(model, inputs)
    for plan, (step, _, _) in steps.items():

        def fitted(step: nn.Module = step) -> None:
            step(*inputs).backward()
            model.zero_grad()

        works[plan] = fitted
    timed(works, 3)
    times = {plan: median(taken) for plan, taken in timed(works, runs).items()}
    return [
        {
            "network": name,
            "plan": plan,
            "actions": actions,
            "moves": moves,
            "eager_us": times["eager"],
            "fitted_us": times[plan],
            "us_each": (times[plan] - times["eager"]) / actions,
            "us_a_move": (times[plan] - times["stock"]) / moves if moves else None,
        }
        for plan, (_, actions, moves) in steps.items()
    ]


def planned(operation: Operation, parts: int, library: Path, given: tuple[Tensor, ...]) -> Callable[[], object]:
    """Return a call of a planned convolution on addresses; given are gradient, input and weight."""
    gradient, x, weight = given
    result = {Operation.FORWARD: None, Operation.BACKWARD_DATA: 0, Operation.BACKWARD_FILTER: 1}[operation]
    problem = replace(PROBLEM, operation=operation)
    backend = CudnnBackend(library_path=str(library), device=TorchGpu(0))
    algorithm = backend.algorithm(problem.part(problem.batch // parts), "eng1")
    assert algorithm is not None
    plan = make_plan(problem, equal_parts(problem, problem.batch // parts, algorithm), backend)
    like = gradient if result is None else (x, weight)[result]
    kernel = StepKernel(
        name=operation.value,
        problem=problem,
        transposed=False,
        result=result,
        output=TracedTensor(0, tuple(like.shape), like.stride(), 0, like.dtype),
        memory_format=torch.contiguous_format,
        copied=(),
        bias=None,
    )
    made = PlannedConvolution(kernel, plan, backend, torch.device("cpu"))
    made._on_gpu = True  # the stand-in takes the host's memory for a GPU's
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    if result is None:
        return lambda: made(x, weight, *rest)
    return lambda: made(gradient, x, weight, *rest, [result == 0, result == 1, False])


def convolutions(runs: int) -> list[dict[str, object]]:
    """Return a row for each kernel of a planned convolution, in one call of cuDNN and in four micro-batches."""
    begin()
    given = torch.randn(8, 6, 7, 6), torch.randn(8, 4, 7, 6), torch.randn(6, 4, 3, 3)
    learned = given[1].clone().requires_grad_()
    works: dict[str, Callable[[], object]] = {"eager": lambda: torch.relu(learned)}
    with idle_cudnn() as library:
        for operation in Operation:
            for parts in (1, 4):
                name = f"{operation.value} in {parts}"
                works[name] = planned(operation, parts, library, given)
        times = {kernel: min(taken) for kernel, taken in timed(works, 4 * runs, 20).items()}
    eager = times.pop("eager")
    return [
        {"kernel": kernel, "us": us, "eager_us": eager, "us_over": us - eager, "calls": int(kernel.split()[-1])}
        for kernel, us in times.items()
    ]


def most(rows: Sequence[Mapping[str, object]], key: str) -> float:
    """Return the largest figure of rows that have one."""
    return max(float(str(row[key])) for row in rows if row[key] is not None)


def main() -> bool:
    """Measure, print and save."""
    parser = command_line(__doc__, "bench.memory.fitted_host_cost", "memory/fitted_host_cost.json")
    parser.add_argument("--runs", type=int, default=150, help="steps of each kind (%(default)s)")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    print(f"{'network':12}{'plan':16}{'actions':>9}{'eager µs':>11}{'fitted µs':>11}{'µs each':>9}{'a move':>9}")
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as fresh:  # malloc's holes cost time
        for found in fresh.map(measure, networks(), repeat(arguments.runs)):
            for row in found:
                numbers = f"{row['actions']:9}{row['eager_us']:11.0f}{row['fitted_us']:11.0f}{row['us_each']:9.2f}"
                move = f"{row['us_a_move']:9.2f}" if row["moves"] else ""
                print(f"{row['network']:12}{row['plan']:16}{numbers}{move}", flush=True)
            rows += found
        kernels = fresh.submit(convolutions, arguments.runs).result()
    for row in kernels:
        print(f"{row['kernel']:28}{row['us']:9.2f} µs, eager ReLU {row['eager_us']:.2f}, over it {row['us_over']:.2f}")
    required = [
        verdict("host time of an action beyond eager's operation", most(rows, "us_each"), MOST_US, " µs"),
        verdict("host time of a move", most(rows, "us_a_move"), MOST_US, " µs"),
        verdict("host time of a planned convolution beyond an eager ReLU", most(kernels, "us_over"), MOST_US, " µs"),
    ]
    answer = {"conditions": conditions(torch.device("cpu")), "rows": rows, "kernels": kernels, "required": required}
    save(out_of(arguments), answer)
    return all(bool(each["met"]) for each in required)


if __name__ == "__main__":
    run_main(main)
