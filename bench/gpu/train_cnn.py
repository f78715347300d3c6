"""A small CNN trains with CuPy arrays through `ucudnn.cudnn`: on plain cuDNN and in micro-batches, side by side.

    python -m bench.gpu.train_cnn                                     needs a GPU
    python -m bench.gpu.train_cnn --workspace 16MiB --batch 128 --steps 100
    python -m bench.gpu.train_cnn --candidates legacy --math fma      cuDNN's legacy algorithms, without TF32
    python -m bench.gpu.train_cnn --find                              plain cuDNN measures its algorithms, too

The network has three convolution layers with bias, ReLU and max pooling, a fully connected layer, softmax cross-entropy
and SGD. An image is one of ten random templates with noise. All but the matrix products are functions of
`ucudnn.cudnn`, and the network knows only the address of its handle. One handle is cuDNN's cudnnHandle_t: there, each
convolution takes the first legacy algorithm of cudnnGetConvolution*Algorithm_v7 (with --find: of cudnnFind...) that
fits the workspace limit. The other is a μ-cuDNN handle with the same limit. Both networks start from the same weights
and see the same batches. They step in turn, and each is first in every other step. Times are the GPU's, between events.

Losses differ by rounding only. At the first step, the cause is the order of additions, and the rounding to TF32 in
different algorithms unless --math fma is given. Training then enlarges that difference.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from bench.gpu.cnn import CLASSES, COLOURS, SIZE, Network, Setup, initial_weights
from bench.tools import script
from bench.tools.results import package_version, save
from ucudnn import Handle, cudnn
from ucudnn.backends.cudnn.gpu.cupy_gpu import cupy_module
from ucudnn.cudnn.loading import library
from ucudnn.units import format_bytes, parse_bytes

SETS = 8
"""Batches that are made once and used again and again."""


def batches(rng: np.random.Generator, batch: int) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Return images, each the template of its class with noise (variance about 1), and their classes."""
    templates = rng.normal(0, 1, (CLASSES, COLOURS, SIZE, SIZE)).astype(np.float32)
    made = []
    for _ in range(SETS):
        labels = rng.integers(0, CLASSES, batch)
        noise = rng.standard_normal((batch, COLOURS, SIZE, SIZE), dtype=np.float32)
        made.append((np.float32(0.9) * templates[labels] + np.float32(0.4) * noise, labels))
    return made


def timed(cupy: Any, run: Callable[[], None]) -> float:
    """Return the GPU's milliseconds of the work that a call queues."""
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end))


def train(cupy: Any, networks: dict[str, Network], arguments: Namespace) -> list[dict[str, float]]:
    """Step the networks in turn; return losses and times of each step."""
    data = batches(np.random.default_rng(1), arguments.batch)
    on_gpu = [
        (cupy.asarray(images), cupy.asarray(np.eye(CLASSES, dtype=np.float32)[labels])) for images, labels in data
    ]
    records = []
    print("step  plain loss   ucudnn loss   relative difference   plain ms  ucudnn ms")
    for number in range(arguments.steps):
        images, targets = on_gpu[number % SETS]
        record: dict[str, float] = {"step": number}
        names = list(networks) if number % 2 else list(reversed(networks))
        for name in names:
            network = networks[name]
            network.images.data.copy_from_device(images.data, images.nbytes)
            record[f"{name}_ms"] = timed(cupy, partial(network.step, targets))
            record[f"{name}_loss"] = network.loss(data[number % SETS][1])
        plain, micro = record["plain_loss"], record["ucudnn_loss"]
        record["difference"] = abs(plain - micro) / abs(plain)
        records.append(record)
        if number < 5 or number % 10 == 9:
            print(
                f"{number:4}  {plain:10.7f}    {micro:10.7f}   {record['difference']:19.1e}"
                f" {record['plain_ms']:10.3f} {record['ucudnn_ms']:10.3f}",
                flush=True,
            )
    return records


def parsed() -> Namespace:
    """Return the command line."""
    parser = script.command_line(__doc__, __spec__.name, "gpu/train_cnn.json")
    parser.add_argument("--steps", type=int, default=100, help="training steps of each network (%(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="mini-batch size (%(default)s)")
    parser.add_argument("--workspace", default="64MiB", help="limit of each convolution, on both handles (%(default)s)")
    parser.add_argument("--rate", type=float, default=3e-5, help="learning rate (%(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="first steps that the medians leave out (%(default)s)")
    parser.add_argument("--math", choices=("tf32", "fma"), default="tf32", help="whether TF32 is allowed (%(default)s)")
    parser.add_argument("--candidates", default="graph", help="ucudnn's: best, graph, legacy or every (%(default)s)")
    parser.add_argument("--policy", help="ucudnn's batch-size policy (powerOfTwo)")
    parser.add_argument("--find", action="store_true", help="plain cuDNN measures its algorithms before it chooses")
    arguments = parser.parse_args()
    if arguments.steps <= arguments.warmup:
        parser.error("--steps must be more than --warmup")
    return arguments


def networks_of(arguments: Namespace, owner: Handle) -> dict[str, Network]:
    """Return the network on plain cuDNN and the network on a μ-cuDNN handle, with the same weights."""
    # `ucudnn.cudnn` does not know handles that cuDNN itself makes, and leaves their convolutions whole.
    handles = {"plain": library().call("cudnnCreate"), "ucudnn": cudnn.adopt(owner)}
    math_type = cudnn.CUDNN_FMA_MATH if arguments.math == "fma" else cudnn.CUDNN_DEFAULT_MATH
    limit, weights = parse_bytes(arguments.workspace), initial_weights(np.random.default_rng(0))
    return {
        name: Network(
            cupy_module(),
            Setup(handle=handle, limit=limit, math_type=math_type, find=arguments.find),
            arguments.batch,
            weights,
            arguments.rate,
        )
        for name, handle in handles.items()
    }


def answer_of(
    arguments: Namespace, owner: Handle, networks: dict[str, Network], records: list[dict[str, float]]
) -> dict[str, Any]:
    """Return the results of all steps."""
    counted = records[arguments.warmup :]
    times = {name: median(record[f"{name}_ms"] for record in counted) for name in networks}
    differences = [record["difference"] for record in records]
    versions = {"ucudnn": package_version("ucudnn"), "numpy": np.__version__}
    return {
        "conditions": {**owner.backend.conditions(), **versions},
        "arguments": {name: value for name, value in vars(arguments).items() if name not in ("out", "default_out")},
        "median_ms": times,
        "speedup": times["plain"] / times["ucudnn"],
        "workspace_bytes": {"plain": networks["plain"].workspace_bytes, "ucudnn": owner.workspace_bytes},
        "plain_kernels": [
            {"operation": each.operation, "algorithm": each.algorithm, "workspace_bytes": each.workspace_bytes}
            for each in networks["plain"].kernels
        ],
        "ucudnn_report": owner.report().to_dict(),
        "first_difference": differences[0],
        "largest_difference": max(differences),
        "steps": records,
    }


def show(answer: dict[str, Any]) -> None:
    """Print the results."""
    conditions, arguments, steps = answer["conditions"], answer["arguments"], answer["steps"]
    times, held = answer["median_ms"], answer["workspace_bytes"]
    print(f"{conditions['device']}, cuDNN {conditions['cudnn']}, batch {arguments['batch']}")
    print(
        f"loss: {steps[0]['plain_loss']:.4f} -> plain {steps[-1]['plain_loss']:.4f},"
        f" ucudnn {steps[-1]['ucudnn_loss']:.4f}; relative difference {answer['first_difference']:.1e} at the first"
        f" step, {answer['largest_difference']:.1e} at most"
    )
    print(
        f"step, median of {len(steps) - arguments['warmup']}: plain {times['plain']:.3f} ms,"
        f" ucudnn {times['ucudnn']:.3f} ms, {answer['speedup']:.2f}x; planned in {answer['planning_seconds']:.1f} s"
    )
    print(
        f"workspace within {arguments['workspace']}: plain {format_bytes(held['plain'])},"
        f" ucudnn {format_bytes(held['ucudnn'])}"
    )


def main() -> None:
    """Train both networks, print and write the results."""
    arguments = parsed()
    limit = parse_bytes(arguments.workspace)
    owner = Handle(backend=f"cudnn:{arguments.candidates}", workspace_limit=limit, policy=arguments.policy)
    networks = networks_of(arguments, owner)
    start = perf_counter()
    owner.optimize()
    planning = perf_counter() - start
    records = train(cupy_module(), networks, arguments)
    answer = {**answer_of(arguments, owner, networks, records), "planning_seconds": planning}
    save(script.out_of(arguments), answer)
    show(answer)


if __name__ == "__main__":
    script.run_main(main)
