"""AlexNet for `caffe time`, and a small CNN for `caffe train`, as Caffe's prototxt.

    python -m bench.caffe.net [--batch 256] > alexnet.prototxt

AlexNet has a loss and made-up data, so that backward convolutions run without `force_backward`. conv2, conv4 and conv5
have two groups, as in the paper. The CNN reads an HDF5 file and learns which of ten patterns lies under noise.
"""

from pathlib import Path

from bench.tools.script import command_line

PATTERNS, SAMPLES, SIDE = 10, 2048, 32


def layer(name: str, kind: str, bottom: str, *, top: str = "", parameters: str = "") -> str:
    """Return a layer with one input."""
    return f'layer {{ name: "{name}" type: "{kind}" bottom: "{bottom}" top: "{top or name}" {parameters} }}\n'


def convolution(
    name: str, bottom: str, filters: int, kernel: int, *, pad: int = 0, stride: int = 1, group: int = 1
) -> str:
    """Return a convolution and its ReLU."""
    fillers = 'weight_filler { type: "xavier" } bias_filler { type: "constant" value: 0.1 }'
    sizes = f"num_output: {filters} kernel_size: {kernel} pad: {pad} stride: {stride} group: {group}"
    text = layer(name, "Convolution", bottom, parameters=f"convolution_param {{ {sizes} {fillers} }}")
    return text + layer(f"relu_{name}", "ReLU", name, top=name)


def pool(name: str, bottom: str) -> str:
    """Return a maximum over 3 x 3."""
    return layer(name, "Pooling", bottom, parameters="pooling_param { pool: MAX kernel_size: 3 stride: 2 }")


def norm(name: str, bottom: str) -> str:
    """Return a local response normalization."""
    return layer(name, "LRN", bottom, parameters="lrn_param { local_size: 5 alpha: 0.0001 beta: 0.75 }")


def dense(name: str, bottom: str, outputs: int) -> str:
    """Return a fully connected layer."""
    fillers = 'weight_filler { type: "xavier" }'
    return layer(name, "InnerProduct", bottom, parameters=f"inner_product_param {{ num_output: {outputs} {fillers} }}")


def loss(bottom: str) -> str:
    """Return the loss."""
    return f'layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "{bottom}" bottom: "label" top: "loss" }}\n'


def alexnet(batch: int) -> str:
    """Return AlexNet with two groups, at 227 x 227."""
    data = (
        'layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {\n'
        f"  shape {{ dim: {batch} dim: 3 dim: 227 dim: 227 }} shape {{ dim: {batch} }}\n"
        '  data_filler { type: "constant" value: 0.5 } data_filler { type: "constant" value: 1 } } }\n'
    )
    text = 'name: "alexnet"\n' + data
    text += convolution("conv1", "data", 96, 11, stride=4) + norm("norm1", "conv1") + pool("pool1", "norm1")
    text += convolution("conv2", "pool1", 256, 5, pad=2, group=2) + norm("norm2", "conv2") + pool("pool2", "norm2")
    text += convolution("conv3", "pool2", 384, 3, pad=1)
    text += convolution("conv4", "conv3", 384, 3, pad=1, group=2)
    text += convolution("conv5", "conv4", 256, 3, pad=1, group=2) + pool("pool5", "conv5")
    for name, bottom in (("fc6", "pool5"), ("fc7", "fc6")):
        text += dense(name, bottom, 4096) + layer(f"relu_{name}", "ReLU", name, top=name)
    return text + dense("fc8", "fc7", 1000) + loss("fc8")


def small(folder: Path, batch: int) -> str:
    """Return a CNN that reads the HDF5 files of list.txt in a folder."""
    data = (
        'layer { name: "data" type: "HDF5Data" top: "data" top: "label"'
        f' hdf5_data_param {{ source: "{folder / "list.txt"}" batch_size: {batch} }} }}\n'
    )
    text = 'name: "small"\n' + data + convolution("conv1", "data", 64, 5, pad=2) + pool("pool1", "conv1")
    text += convolution("conv2", "pool1", 192, 5, pad=2, group=2) + pool("pool2", "conv2")
    text += convolution("conv3", "pool2", 192, 3, pad=1)
    return text + dense("ip1", "conv3", PATTERNS) + loss("ip1")


def solver(net: Path, iterations: int, out: Path) -> str:
    """Return a solver that prints the loss of each iteration."""
    return (
        f'net: "{net}" base_lr: 0.002 momentum: 0.9 lr_policy: "fixed" display: 1 max_iter: {iterations}\n'
        f'snapshot: 0 snapshot_after_train: false snapshot_prefix: "{out}" random_seed: 7 solver_mode: GPU\n'
    )


def write_patterns(folder: Path) -> None:
    """Write samples and labels, which are the same in every run."""
    import h5py
    import numpy as np

    rng = np.random.default_rng(7)
    blocks = rng.standard_normal((PATTERNS, 3, 4, 4), dtype=np.float32)
    patterns = np.kron(blocks, np.ones((SIDE // 4, SIDE // 4), np.float32))
    labels = rng.integers(0, PATTERNS, SAMPLES)
    data = patterns[labels] * 0.15 + rng.standard_normal((SAMPLES, 3, SIDE, SIDE), dtype=np.float32)
    with h5py.File(folder / "patterns.h5", "w") as file:
        file["data"], file["label"] = data, labels.astype(np.float32)
    (folder / "list.txt").write_text(f"{folder / 'patterns.h5'}\n")


def main() -> None:
    """Print AlexNet."""
    parser = command_line(__doc__, __spec__.name)
    parser.add_argument("--batch", type=int, default=256, help="mini-batch size (%(default)s)")
    print(alexnet(parser.parse_args().batch), end="")


if __name__ == "__main__":
    main()
