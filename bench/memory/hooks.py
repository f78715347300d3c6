"""Steps that no plan can follow, and one that can, within budgets by hooks: their time and memory beside eager PyTorch.

    python -m bench.memory.hooks                           # on a GPU, 220 s
    python -m bench.memory.hooks --network mixtral
    python -m bench.memory.hooks --device cpu --small --out trial.json    # tries the script out

Faster R-CNN comes from torchvision, a Mixtral of eight small experts and Wav2Vec2 with CTC from transformers, with
random weights and data. Each network trains eagerly, within 80 and within 60 % of the eager peak, each in a process of
its own. Behind the first steps, the processes take turns, because a host is not always as fast. A peak is the most
of any step: bytes that PyTorch's allocator had reserved, and those beside it when the step ended; of the eager step,
bytes of tensors and the latter. How often the allocator unmapped pages for want of memory is counted behind the first
steps.
"""

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from statistics import median
from time import perf_counter
from typing import Any, final

import torch
from torch import Tensor, nn

from bench.memory.models import resnet50
from bench.tools.results import cpu_conditions, save_case
from bench.tools.script import add_commit, command_line, commit_of, note, out_of, run_main
from ucudnn.errors import UcudnnError
from ucudnn.memory import budget
from ucudnn.memory.torch.device.stated_budget import outside_bytes
from ucudnn.units import format_bytes

SHARES = (0.8, 0.6)
WARM = 20
TURNS, IN_TURN = 12, 3  # the first step of a turn does not count
Setting = tuple[nn.Module, Callable[[], Tensor]]  # a model and what returns its loss


def residual(device: str, *, small: bool) -> Setting:
    """Return ResNet-50 of 256 pictures in channels last."""
    model = resnet50().to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    count, side = (2, 64) if small else (256, 224)
    x = torch.randn(count, 3, side, side, device=device).contiguous(memory_format=torch.channels_last)
    y = torch.randint(1000, (count,), device=device)
    return model, lambda: nn.functional.cross_entropy(model(x), y)


def detector(device: str, *, small: bool) -> Setting:
    """Return Faster R-CNN with 8 pictures of 20 boxes."""
    detection: Any = import_module("torchvision.models.detection")
    model = detection.fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91).to(device)
    count, side, boxes = (1, 96, 3) if small else (8, 800, 20)
    drawn = torch.rand(2, count, boxes, 2, device=device)
    places = torch.cat([drawn[0] / 2, drawn[0] / 2 + drawn[1] * 0.4 + 0.1], 2) * side
    targets = [{"boxes": each, "labels": torch.randint(1, 91, (boxes,), device=device)} for each in places]
    pictures = [*torch.rand(count, 3, side, side, device=device)]
    return model, lambda: sum(model(pictures, targets).values(), torch.zeros((), device=device))


def mixtral(device: str, *, small: bool) -> Setting:
    """Return a Mixtral of 8 layers with 8 experts each in bfloat16 by autocast."""
    hub: Any = import_module("transformers")
    width, layers, count, length, words = (64, 4, 8, 128, 500) if small else (1024, 8, 8, 1024, 8000)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers, "vocab_size": words}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_local_experts": 8, "use_cache": False}
    model = hub.MixtralForCausalLM(hub.MixtralConfig(**sizes, **heads)).to(device)
    tokens = torch.randint(words, (count, length), device=device)

    def loss() -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return model(input_ids=tokens, labels=tokens).loss

    return model, loss


def speech(device: str, *, small: bool) -> Setting:
    """Return Wav2Vec2 with CTC on 8 recordings of 10 seconds."""
    hub: Any = import_module("transformers")
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 128}
    sizes |= {"conv_dim": [64] * 7, "num_conv_pos_embeddings": 16}
    model = hub.Wav2Vec2ForCTC(hub.Wav2Vec2Config(**(sizes if small else {}), ctc_zero_infinity=True)).to(device)
    count, length = (2, 64000) if small else (8, 160000)
    sound, text = torch.randn(count, length, device=device), torch.randint(1, 32, (count, 20), device=device)
    return model, lambda: model(sound, labels=text).loss


NETWORKS = {"faster_rcnn": detector, "mixtral": mixtral, "wav2vec2": speech, "resnet50": residual}


def trial(arguments: Namespace) -> None:
    """Train a new model in this process, within the bytes that a line of the input says, or eagerly for 0.

    A line of JSON says that steps are as they will be. One with times follows for each further line of the input, and
    one with the peak at its end.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    device, on_gpu = arguments.device, arguments.device == "cuda"
    where = torch.device(device, torch.cuda.current_device()) if on_gpu else torch.device(device)
    model, loss = NETWORKS[arguments.network](device, small=arguments.small)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    limit = int(sys.stdin.readline())
    block: Any = budget(limit or "1024GiB", device=where) if limit or not on_gpu else nullcontext()
    peak, within, error, before = 0, None, "", 0

    def step() -> float:
        nonlocal peak
        begin = perf_counter()
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()
        ms = (perf_counter() - begin) * 1e3
        if within is not None:
            peak = max(peak, within.peak_bytes, torch.cuda.memory_reserved() + outside_bytes(where))
        else:
            peak = torch.cuda.max_memory_allocated() + outside_bytes(where)
        return ms

    try:
        with block as within:
            warm = [step() for _ in range(WARM)]
            before = torch.cuda.memory_stats()["num_alloc_retries"] if on_gpu else 0
            print(json.dumps({"warm_ms": [round(each, 1) for each in warm], "peak": peak}), flush=True)
            for _ in sys.stdin:
                times = [step() for _ in range(IN_TURN)]
                print(json.dumps([round(each, 2) for each in times[1:]]), flush=True)
    except UcudnnError as refused:
        error = f"{type(refused).__name__}: {refused}"
    unmapped = torch.cuda.memory_stats()["num_alloc_retries"] - before if on_gpu else 0
    found = {"peak": peak, "error": error, "report": within.report() if within else "", "unmapped": unmapped}
    print(json.dumps(found), flush=True)


@final
class Trial:
    """A process that trains one model in one way."""

    def __init__(self, arguments: Namespace) -> None:
        options = ["--network", arguments.network, "--device", arguments.device]
        command = [sys.executable, "-m", "bench.memory.hooks", "--here", *options]
        self._process = subprocess.Popen(
            [*command, *(["--small"] if arguments.small else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.found: dict[str, Any] = {"budget": 0, "steps_ms": [], "peak": 0, "error": "", "report": ""}

    def begin(self, limit: int) -> None:
        """Let it train within some bytes, until its steps are as they will be."""
        self.found["budget"] = limit
        self._ask(f"{limit}\n")
        self._take(self._line())

    def measure(self) -> None:
        """Let it train for some steps, while the other processes wait."""
        if not self.found["error"]:
            self._ask("\n")
            found = self._line()
            if isinstance(found, list):
                self.found["steps_ms"] += found
            else:
                self._take(found)

    def end(self) -> dict[str, Any]:
        """Return what it found."""
        if not self.found["error"]:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._take(self._line())
        self._process.wait()
        shown = self.found["steps_ms"] or [0.0]
        return {"ms": median(shown), "least_ms": min(shown), "most_ms": max(shown), **self.found}

    def _ask(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def _line(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": f"the process ended with {self._process.wait()}"}

    def _take(self, found: dict[str, Any]) -> None:
        self.found |= {**found, "peak": max(self.found["peak"], found.get("peak", 0))}


def compare(arguments: Namespace) -> dict[str, dict[str, Any]]:
    """Return what eager steps and those within shares of their peak take, which are measured in turns."""
    trials = {share: Trial(arguments) for share in (1.0, *SHARES)}  # to load a model takes longer than to train it
    for share, each in trials.items():
        each.begin(int(trials[1.0].found["peak"] * share) if share < 1 else 0)
    for _ in range(TURNS):
        for each in trials.values():
            each.measure()
    return {str(share): {"share": share, **each.end()} for share, each in trials.items()}


def main() -> bool:
    """Run all networks, print and write them; return whether all budgets were kept at 1.25 of the time for 80 %."""
    parser = command_line(__doc__, "bench.memory.hooks", "memory/hooks.json")
    parser.add_argument("--network", choices=NETWORKS, help="this one only")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small models, to try the script out")
    parser.add_argument("--here", action="store_true", help="train one model in this process")
    add_commit(parser)
    arguments = parser.parse_args()
    if arguments.here:
        trial(arguments)
        return True
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    conditions = {**cpu_conditions("torch", "torchvision", "transformers"), "device": name, "small": arguments.small}
    kept = True
    for network in [arguments.network] if arguments.network else NETWORKS:
        trials = compare(Namespace(**{**vars(arguments), "network": network}))
        for found in trials.values():
            found["of_eager"] = found["ms"] / (trials["1.0"]["ms"] or 1.0)
            fast = found["share"] != SHARES[0] or arguments.small or found["of_eager"] <= 1.25
            within = not found["budget"] or found["peak"] <= found["budget"]
            kept = kept and not found["error"] and fast and within
            note(f"{found['error']}\n{found['report']}\nunmapped: {found.get('unmapped')}")
            note(f"warm: {found.get('warm_ms')}\nsteps: {found['steps_ms']}")
            shown = [f"{found[key]:.1f}" for key in ("ms", "least_ms", "most_ms")]
            sizes = [format_bytes(found[key]) for key in ("peak", "budget")]
            line = [network, str(found["share"]), *shown, f"{found['of_eager']:.3f}", *sizes]
            print(" | ".join(line), flush=True)
        save_case(
            out_of(arguments),
            network,
            {"conditions": {**conditions, "commit": commit_of(arguments)}, "trials": trials},
        )
    return kept


if __name__ == "__main__":
    run_main(main)
