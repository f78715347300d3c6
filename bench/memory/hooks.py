"""Steps that no plan can follow, and one that can, within budgets by hooks: their time and memory beside eager PyTorch.

    python -m bench.memory.hooks                           # on a GPU, about 5 minutes
    python -m bench.memory.hooks --network mixtral
    python -m bench.memory.hooks --device cpu --small --out trial.json    # tries the script out

Faster R-CNN comes from torchvision, a Mixtral of eight small experts and Wav2Vec2 with CTC from transformers, with
random weights and data. Each network trains eagerly, within 80 and within 60 % of the eager peak, in turns, because a
host is not always as fast. Each turn is a process of its own, alone on the GPU as training is, whose first steps do not
count. A peak is the most of any step: bytes that PyTorch's allocator had reserved, and those beside it when the step
ended; of the eager step, bytes of tensors and the latter. How often the allocator unmapped pages for want of memory is
counted behind the first steps.
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
from typing import Any

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
WARM, COUNTED, TURNS = 20, 15, 2  # steps of a turn that do not count, and those that do
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
    """Train a new model in this process within some bytes, or eagerly for 0; print times and the peak."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    device, on_gpu, limit = arguments.device, arguments.device == "cuda", arguments.limit
    where = torch.device(device, torch.cuda.current_device()) if on_gpu else torch.device(device)
    model, loss = NETWORKS[arguments.network](device, small=arguments.small)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    block: Any = budget(limit or "1024GiB", device=where) if limit or not on_gpu else nullcontext()
    peak, within, error, times, before = 0, None, "", list[float](), 0
    try:
        with block as within:
            for _ in range(WARM + COUNTED):
                if on_gpu and len(times) == WARM:
                    before = torch.cuda.memory_stats()["num_alloc_retries"]
                begin = perf_counter()
                optimizer.zero_grad()
                loss().backward()
                optimizer.step()
                if on_gpu:
                    torch.cuda.synchronize()
                times.append(round((perf_counter() - begin) * 1e3, 2))
                if within is not None:
                    peak = max(peak, within.peak_bytes, torch.cuda.memory_reserved() + outside_bytes(where))
                else:
                    peak = torch.cuda.max_memory_allocated() + outside_bytes(where)
    except UcudnnError as refused:
        error = f"{type(refused).__name__}: {refused}"
    unmapped = torch.cuda.memory_stats()["num_alloc_retries"] - before if on_gpu else 0
    found = {"budget": limit, "warm_ms": times[:WARM], "steps_ms": times[WARM:], "peak": peak, "error": error}
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(json.dumps({**found, "unmapped": unmapped, "report": within.report() if within else "", "device": name}))


def turn(arguments: Namespace, limit: int) -> dict[str, Any]:
    """Return what a process finds that trains within some bytes."""
    command = [sys.executable, "-m", "bench.memory.hooks", "--limit", str(limit)]
    command += ["--network", arguments.network, "--device", arguments.device, *["--small"] * arguments.small]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        error = f"the process ended with {done.returncode}"
        return {"budget": limit, "warm_ms": [], "steps_ms": [], "peak": 0, "error": error, "unmapped": 0, "report": ""}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(arguments: Namespace) -> dict[str, dict[str, Any]]:
    """Return what eager steps and those within shares of their peak take, which are measured in turns."""
    turns: dict[float, list[dict[str, Any]]] = {share: [] for share in (1.0, *SHARES)}
    for _ in range(TURNS):
        for share, found in turns.items():
            found.append(turn(arguments, int(turns[1.0][0]["peak"] * share) if share < 1 else 0))
    return {str(share): {"share": share, **merged(found)} for share, found in turns.items()}


def merged(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what several turns found: all times, the largest peak and the last report."""
    steps = [ms for each in turns for ms in each["steps_ms"]]
    shown = steps or [0.0]
    return {
        **turns[-1],
        "ms": median(shown),
        "least_ms": min(shown),
        "most_ms": max(shown),
        "steps_ms": steps,
        "peak": max(each["peak"] for each in turns),
        "error": next((each["error"] for each in turns if each["error"]), ""),
        "unmapped": sum(each["unmapped"] for each in turns),
    }


def main() -> bool:
    """Run all networks, print and write them; return whether all budgets were kept at 1.25 of the time for 80 %."""
    parser = command_line(__doc__, "bench.memory.hooks", "memory/hooks.json")
    parser.add_argument("--network", choices=NETWORKS, help="this one only")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small models, to try the script out")
    parser.add_argument("--limit", type=int, help="train one network in this process within some bytes, 0 for all")
    add_commit(parser)
    arguments = parser.parse_args()
    if arguments.limit is not None:
        trial(arguments)
        return True
    versions, kept = cpu_conditions("torch", "torchvision", "transformers"), True
    for network in [arguments.network] if arguments.network else NETWORKS:
        trials = compare(Namespace(**{**vars(arguments), "network": network}))
        for found in trials.values():
            found["of_eager"] = found["ms"] / (trials["1.0"]["ms"] or 1.0)
            fast = found["share"] != SHARES[0] or arguments.small or found["of_eager"] <= 1.25
            within = not found["budget"] or found["peak"] <= found["budget"]
            kept = kept and not found["error"] and fast and within
            note(f"{found['error']}\n{found['report']}\nunmapped: {found['unmapped']}")
            note(f"warm: {found['warm_ms']}\nsteps: {found['steps_ms']}")
            shown = [f"{found[key]:.1f}" for key in ("ms", "least_ms", "most_ms")]
            sizes = [format_bytes(found[key]) for key in ("peak", "budget")]
            line = [network, str(found["share"]), *shown, f"{found['of_eager']:.3f}", *sizes]
            print(" | ".join(line), flush=True)
        device = trials["1.0"].get("device", "")
        conditions = {**versions, "device": device, "small": arguments.small, "commit": commit_of(arguments)}
        save_case(out_of(arguments), network, {"conditions": conditions, "trials": trials})
    return kept


if __name__ == "__main__":
    run_main(main)
