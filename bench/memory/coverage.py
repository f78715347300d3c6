"""Which public models train to the bit under `fit`: two steps of each beside the plain loop, on the CPU.

    pip install timm torchvision transformers diffusers monai segmentation-models-pytorch torch_geometric einops
    python -m bench.memory.coverage [FAMILY ...]

Each model is a process with a time limit. Its step is fitted without a budget first, then within 70 % of the peak, or
within the least share that has a plan. One that is refused trains by hooks within such a share of its peak. Its samples
are doubled first, until its state is an eighth of the peak, at most to 128 times as many. A model that the file has is
not trained again, unless --again says for which outcomes. Models whose plain step fails with our arguments do not
count; others are drawn in their place.
"""

import gc
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

import numpy as np
import torch
import torch._dynamo  # some models import it, which would take each process seconds
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bench.memory import public_models as public
from bench.memory.public_models import SEED, Case, Source
from bench.tools.results import cpu_conditions, load, save_case
from bench.tools.script import add_commit, add_names, command_line, commit_of, note, out_of, run_main
from ucudnn.errors import BudgetError, UcudnnError
from ucudnn.memory import budget, fit
from ucudnn.memory.step.liveness import measure_liveness

PACKAGES = (
    "timm",
    "torchvision",
    "transformers",
    "diffusers",
    "monai",
    "segmentation-models-pytorch",
    "torch-geometric",
)
TASKS = {"ForCausalLM": 20, "ForMaskedLM": 8, "ForSeq2SeqLM": 6, "ForSequenceClassification": 6, "": 12}
TASKS |= {"ForImageClassification": 10, "ForSemanticSegmentation": 4, "ForAudioClassification": 3, "ForCTC": 2}
FAMILIES: dict[str, list[tuple[Callable[[], Source], int]]] = {
    "timm": [(public.timm_models, 60)],
    "torchvision": [(public.torchvision_models, 18)],
    "transformers": [(partial(public.transformers_models, task), most) for task, most in TASKS.items()],
    "diffusers": [(partial(public.listed_models, "diffusers", "ModelMixin"), 10)],
    "monai": [(partial(public.listed_models, "monai.networks.nets"), 22)],
    "segmentation_models": [(public.segmentation_models, 12)],
    "torch_geometric": [(partial(public.listed_models, "torch_geometric.nn.models"), 12)],
}
NOT_PLAIN, SAME, HOOKED, REFUSED, DIFFERS, RAISED, SLOW = (
    "plain fails",
    "to the bit",
    "by hooks",
    "refused",
    "differs",
    "raised",
    "too slow",
)
SHARES = (70, 85, 100, 120)
"""Budgets in percent of the step's peak; above it, because gradients of outputs are not known before the first step."""
TIMES, STATE_PART = (1, 2, 4, 8, 16, 32, 64, 128), 8
"""A step by hooks has the first of these times the samples with which its state is at most that part of its peak."""


def seed() -> None:
    """Seed all generators."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)  # libraries draw from it


def reduced(output: Any) -> Tensor:
    """Return the loss that a model returns, or else the mean square of what it returns."""
    held = output.get("loss") if isinstance(output, dict) else None
    if held is not None:
        return held
    floats = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad]
    return sum((each.float().square().mean() for each in floats), torch.zeros(()))


def bits(tensors: Iterable[Tensor]) -> list[str]:
    """Return digests of tensors, which take no memory that a budget counts."""
    flat = (each.detach().resolve_conj().resolve_neg().reshape(-1) for each in tensors)
    return [sha256(each.view(torch.uint8).numpy().tobytes()).hexdigest() for each in flat]


def trained(case: Case, call: Callable[..., Any]) -> list[str]:
    """Train two steps; return the bits of losses, gradients and what the model holds then."""
    optimizer = torch.optim.SGD(case.model.parameters(), 0.01, momentum=0.9)
    seed()
    found = list[str]()
    for _ in range(2):
        optimizer.zero_grad()
        loss = reduced(call(*case.args, **case.kwargs)) if case.loss is None else call(*case.args, **case.kwargs)
        loss.backward()
        found += bits([loss, *(each.grad for each in case.model.parameters() if each.grad is not None)])
        optimizer.step()
    return found + bits(each for each in case.model.state_dict().values() if isinstance(each, Tensor))


def made(make: Callable[[], Case]) -> Case:
    """Return a model in training mode; each call returns the same."""
    seed()
    case = make()
    case.model.train()
    return case


def plain(case: Case) -> Callable[..., Any]:
    """Return what the plain loop calls."""
    loss = case.loss
    return case.model if loss is None else lambda *args: loss(case.model(*args[:-1]), args[-1])


def fitted(case: Case, **options: Any) -> Any:
    """Return the fitted step."""
    sample = (case.args or case.kwargs) if not (case.args and case.kwargs) else (*case.args, *case.kwargs.values())
    return fit(case.model, sample, loss=case.loss, plan_seconds=1.0, **options)


@contextmanager
def traced_once(known: list[Any]) -> Iterator[None]:
    """Let all fits of a block take the first trace, which is most of their time; steps that run make their own."""
    module: Any = import_module("ucudnn.memory.torch.running.fit")
    trace = module.trace_program

    def traced(subject: Any, name: str, batch: int, **more: Any) -> Any:
        if more or subject.used is not None or subject.in_pieces:
            return trace(subject, name, batch, **more)
        known.extend([] if known else [trace(subject, name, batch)])
        return known[0]

    module.trace_program = traced
    try:
        yield
    finally:
        module.trace_program = trace


def warm_up() -> None:
    """Load once what all processes need."""
    case = Case(nn.Sequential(nn.Conv2d(3, 3, 1)), (torch.randn(2, 3, 8, 8),), {})
    trained(case, fitted(case, budget="1GiB"))
    gc.freeze()


def planned(make: Callable[[], Case], wanted: list[str]) -> Iterator[dict[str, Any]]:
    """Yield what is known so far of how a model trains by a plan."""
    case, known = made(make), list[Any]()
    with traced_once(known):
        step = fitted(case, policy="stock")
    found = {"outcome": REFUSED, "operations": len(step.plan.graph.operations)}
    yield {**found, "outcome": SLOW}
    peak, floor = step.simulation.peak_bytes, measure_liveness(step.plan.graph, step.costs).floor_bytes
    for share in (each for each in SHARES if peak * each // 100 >= floor):
        try:
            with traced_once(known):
                step = fitted(case, budget=peak * share // 100)
            ours = trained(case, step)
        except BudgetError as error:
            found["message"] = str(error)
            continue
        if ours == wanted:
            yield {**found, "message": "", "outcome": SAME, "share": share}
        elif wanted == trained(case := made(make), plain(case)):
            yield {**found, "message": "", "outcome": DIFFERS, "share": share}
        else:
            yield {"outcome": NOT_PLAIN, "message": "two plain loops differ"}
        return
    yield found


def grown(case: Case, times: int) -> Case:
    """Return a step of so many times the samples; graphs become one graph of copies, as in a mini-batch of them."""

    def repeated(given: Any) -> Any:
        if isinstance(given, list):
            return given * times
        return given.repeat(times, *[1] * (given.dim() - 1)) if isinstance(given, Tensor) and given.dim() else given

    kwargs = {name: repeated(each) for name, each in case.kwargs.items()}
    if "edge_index" in kwargs:
        data: Any = import_module("torch_geometric.data")
        graphs = data.Batch.from_data_list([data.Data(**case.kwargs)] * times)
        kwargs = {name: graphs[name] for name in kwargs}
    return case._replace(args=tuple(map(repeated, case.args)), kwargs=kwargs)


def state_bytes(case: Case) -> int:
    """Return the bytes of a trained model's parameters, gradients and momentum."""
    return sum(each.nbytes * (1 if each.grad is None else 3) for each in case.model.parameters())


def hooked(make: Callable[[], Case]) -> dict[str, Any]:
    """Return how a model trains by hooks, within the least share of its peak that they keep.

    Its samples are doubled until parameters, gradients and momentum, which stay, do not own the peak of a small step.
    """
    for times in TIMES:
        case = grown(made(make), times)  # outside of the block, which would count what the library makes for it
        with budget("1024GiB", device="cpu") as free:
            wanted = trained(case, plain(case))
        if state_bytes(case) * STATE_PART <= free.peak_bytes:
            break
    found: dict[str, Any] = {"times": times, "state_percent": 100 * state_bytes(case) // free.peak_bytes}
    for share in SHARES[:3]:
        case = grown(made(make), times)
        try:
            with budget(free.peak_bytes * share // 100, device="cpu"):
                ours = trained(case, plain(case))
        except BudgetError as error:
            found.setdefault("by_hooks", str(error))
        else:
            return {**found, "outcome": HOOKED if ours == wanted else DIFFERS, "share": share}
    return found


def compared(make: Callable[[], Case]) -> Iterator[dict[str, Any]]:
    """Yield what is known so far of how a model trains."""
    yield {"outcome": NOT_PLAIN}
    wanted = trained(case := made(make), plain(case))
    found: dict[str, Any] = {"outcome": SLOW}
    yield found
    try:
        for found in planned(make, wanted):
            yield found
    except UcudnnError as error:
        found = {**found, "outcome": REFUSED, "message": told(error)}
    if found["outcome"] == REFUSED:
        yield found
        yield {**found, **hooked(make)}


def told(error: Exception) -> str:
    """Return what an error says, with its kind."""
    return f"{type(error).__name__}: {error}"[:1000]


def child(make: Callable[[], Case], pipe: Connection) -> None:
    """Send what is known of a model."""
    found: dict[str, Any] = {}
    try:
        for found in compared(make):
            pipe.send(found)
    except Exception as error:  # noqa: BLE001  # that is what is asked
        outcome = NOT_PLAIN if found["outcome"] == NOT_PLAIN else RAISED
        pipe.send({**found, "outcome": outcome, "message": told(error)})


def outcome_of(make: Callable[[], Case], seconds: float) -> dict[str, Any]:
    """Return how a model trains, in a process of its own."""
    context, began = get_context("fork"), monotonic()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(make, sender), daemon=True)
    process.start()
    sender.close()
    found = {"outcome": NOT_PLAIN}
    try:
        while (left := began + seconds - monotonic()) > 0 and receiver.poll(left):
            found = receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode and found["outcome"] != NOT_PLAIN:
            found = {"outcome": RAISED, "message": f"the process ended with {process.exitcode}"}
    process.kill()
    return {**found, "seconds": round(monotonic() - began, 1)}


def main() -> None:
    """Train models until each family has enough; families take turns."""
    parser = command_line(__doc__, "bench.memory.coverage", "memory/coverage.json")
    add_names(parser, FAMILIES)
    add_commit(parser)
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of a model (%(default)s)")
    parser.add_argument("--again", action="append", default=[], help="outcome of models that are trained again")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    out = out_of(arguments)
    assert out is not None
    warm_up()
    conditions = {**cpu_conditions("torch", *PACKAGES), "commit": commit_of(arguments)}

    def counted(family: str, source: Callable[[], Source], most: int) -> Iterator[None]:
        for name, make in source():
            case = f"{family} {name}"
            found = (load(out)["cases"] if out.exists() else {}).get(case)
            if found is None or found["outcome"] in arguments.again:
                found = {"family": family, **outcome_of(make, arguments.seconds), "conditions": conditions}
                save_case(out, case, found)
                note(f"{case}: {found['outcome']} {found.get('message', '')[:200]} ({found['seconds']} s)")
            if found["outcome"] != NOT_PLAIN:
                yield
                most -= 1
            if not most:
                return

    turns = [counted(family, *each) for family in arguments.names or FAMILIES for each in FAMILIES[family]]
    while turns:
        turns = [each for each in turns if next(each, turns) is None]


if __name__ == "__main__":
    run_main(main)
