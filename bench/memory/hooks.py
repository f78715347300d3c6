"""Steps that no plan can follow, and one that can, within budgets by hooks: their time and memory beside eager PyTorch.

    python -m bench.memory.hooks                           # on a GPU, 200 s at most
    python -m bench.memory.hooks --network mixtral --seconds 60
    python -m bench.memory.hooks --device cpu --small --out trial.json    # tries the script out

Faster R-CNN comes from torchvision, a Mixtral of eight small experts and Wav2Vec2 with CTC from transformers, with
random weights and data. Each network has a process of its own, which trains eagerly and then within 80 and 60 % of the
eager peak. A cell ends when its share of the time is used up, and the process is killed if it does not. Its peak is the
most of any step: bytes that PyTorch's allocator had reserved, and those beside it when the step ended; of the eager
step, bytes of tensors and the latter.
"""

import gc
import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from statistics import median
from threading import Timer
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from bench.memory.models import resnet50
from bench.tools.results import cpu_conditions, save_case
from bench.tools.script import command_line, note, out_of, run_main
from ucudnn.errors import UcudnnError
from ucudnn.memory import budget
from ucudnn.memory.torch.device.stated_budget import outside_bytes
from ucudnn.units import format_bytes

SHARES = (0.8, 0.6)
WARM, MEASURED, LEAST = 12, 8, 4
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


def cell(arguments: Namespace, limit: int, seconds: float) -> dict[str, Any]:
    """Train a new model within some bytes, or eagerly for 0; return times and peaks."""
    torch.manual_seed(0)
    device, on_gpu = arguments.device, arguments.device == "cuda"
    where = torch.device(device, torch.cuda.current_device()) if on_gpu else torch.device(device)
    model, loss = NETWORKS[arguments.network](device, small=arguments.small)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    block: Any = budget(limit or "1024GiB", device=where) if limit or not on_gpu else nullcontext()
    end = perf_counter() + seconds
    times: list[float] = []
    peak, within = 0, None
    try:
        with block as within:
            while len(times) < WARM + MEASURED and (len(times) < LEAST or perf_counter() < end):
                begin = perf_counter()
                optimizer.zero_grad()
                loss().backward()
                optimizer.step()
                if on_gpu:
                    torch.cuda.synchronize()
                times.append((perf_counter() - begin) * 1e3)
                if within is not None:
                    peak = max(peak, within.peak_bytes, torch.cuda.memory_reserved() + outside_bytes(where))
                else:
                    peak = torch.cuda.max_memory_allocated() + outside_bytes(where)
        error = ""
    except UcudnnError as refused:
        error = f"{type(refused).__name__}: {refused}"
    shown = times[WARM:] or times[-1:] or [0.0]
    found: dict[str, Any] = {
        "ms": median(shown),
        "least_ms": min(shown),
        "most_ms": max(shown),
        "first_ms": times[0] if times else 0.0,
    }
    found |= {"steps_ms": [round(each, 1) for each in times], "peak": peak, "budget": limit}
    return {**found, "error": error, "report": within.report() if within else ""}


def cells(arguments: Namespace) -> None:
    """Print a line for each cell of a network as soon as it has ended, in this process."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    begin, eager = perf_counter(), 0
    for done, share in enumerate((1.0, *SHARES)):
        left = arguments.seconds - (perf_counter() - begin)
        found = cell(arguments, int(eager * share) if done else 0, max(5.0, left / (len(SHARES) + 1 - done)))
        eager = eager or found["peak"]
        print(json.dumps({"share": share, **found}), flush=True)
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def main() -> bool:
    """Run all cells, print and write them; return whether all budgets were kept at 1.25 of the time for 80 %."""
    parser = command_line(__doc__, "bench.memory.hooks", "memory/hooks.json")
    parser.add_argument("--network", choices=NETWORKS, help="this one only")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small models, to try the script out")
    parser.add_argument("--seconds", type=float, default=48.0, help="most seconds of a network (%(default)s)")
    parser.add_argument("--here", action="store_true", help="measure one network in this process")
    arguments = parser.parse_args()
    if arguments.here:
        cells(arguments)
        return True
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    conditions = {**cpu_conditions("torch", "torchvision", "transformers"), "device": name, "small": arguments.small}
    kept = True
    for network in [arguments.network] if arguments.network else NETWORKS:
        note(f"{network}: {arguments.seconds:.0f} s at most")
        options = ["--network", network, "--device", arguments.device, "--seconds", str(arguments.seconds * 0.8)]
        command = [sys.executable, "-m", "bench.memory.hooks", "--here", *options]
        trials: dict[str, Any] = {}
        with subprocess.Popen(
            [*command, *(["--small"] if arguments.small else [])], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            timer = Timer(arguments.seconds * 1.25, process.kill)
            timer.start()
            for line in process.stdout:
                found = json.loads(line)
                trials[str(found["share"])] = found
                found["of_eager"] = found["ms"] / (trials["1.0"]["ms"] or 1.0)
                fast = found["share"] != SHARES[0] or arguments.small or found["of_eager"] <= 1.25
                kept = (
                    kept and not found["error"] and fast and (not found["budget"] or found["peak"] <= found["budget"])
                )
                note(f"{found['error']}\n{found['report']}\nsteps in ms: {found['steps_ms']}")
                shown = [f"{found[key]:.1f}" for key in ("ms", "least_ms", "most_ms")]
                sizes = [format_bytes(found[key]) for key in ("peak", "budget")]
                print(
                    " | ".join([network, str(found["share"]), *shown, f"{found['of_eager']:.3f}", *sizes]), flush=True
                )
        timer.cancel()
        kept = kept and len(trials) == 1 + len(SHARES)
        save_case(out_of(arguments), network, {"conditions": conditions, "trials": trials})
    return kept


if __name__ == "__main__":
    run_main(main)
