from itertools import pairwise
from math import prod
from pathlib import Path

import pytest

from ucudnn.errors import InvalidNetworkError, InvalidProblemError
from ucudnn.networks.tables import CSV_HEADER, NETWORKS, load_network
from ucudnn.problem import Operation

# Multiply-accumulates of one forward pass of all convolutions, one image, in millions: published figures. The
# paper's AlexNet has 128 filters more in conv4 than the one of the published 656 million.
PUBLISHED = {
    "alexnet": 656 + 13 * 13 * 9 * (384 * 128 + 128 * 256) / 1e6,
    "vgg16": 15347,
    "resnet18": 1814,
    "resnet50": 4087,
    "densenet121": 2834 - 1024 * 1000 / 1e6,  # torchvision's figures include the fully connected layer
    "inception3": 5713 - 2048 * 1000 / 1e6,
}
LAYERS = {"alexnet": 5, "vgg16": 13, "resnet18": 20, "resnet50": 53, "densenet121": 120, "inception3": 94}
DEEPBENCH = Path(__file__).parents[2] / "bench" / "data" / "deepbench.csv"


def test_every_network_is_compared_with_published_figures():
    assert set(PUBLISHED) == set(LAYERS) == set(NETWORKS) - {"unet3d", "resnet1001"}


def test_the_channels_and_sizes_of_the_unet_fit_together():
    network = load_network("unet3d")
    before = 1
    skipped = {}
    for layer in network.layers:
        problem = layer.forward
        stage, _, last = layer.name.partition(".")
        if stage.startswith("dec") and last == "conv1":  # the input is joined with the output of the encoder
            before += skipped[f"enc{stage[3:]}"]
        assert problem.channels == before
        assert problem.output == problem.spatial == (problem.spatial[0],) * 3
        before = skipped[stage] = problem.filters
    assert len(network.layers) == 15
    assert [layer.forward.spatial[0] for layer in network.layers[::2]] == [64, 32, 16, 8, 16, 32, 64, 64]


def test_the_channels_and_sizes_of_densenet_fit_together():
    stem, *layers = load_network("densenet121").layers
    assert stem.forward.output == (112, 112)
    channels, size = stem.forward.filters, (56, 56)
    grown = {}  # for each block, how many layers add channels, and how many there are
    halved = []
    for layer in layers:
        problem = layer.forward
        part = layer.name.split(".")
        assert (problem.spatial, problem.output) == (size, size)
        if part[-1] == "conv2":
            assert (problem.channels, problem.filters) == (128, 32)
            grown[part[1]][1] += layer.count
            continue
        assert (problem.channels, layer.count) == (channels, 1)
        if part[-1] == "conv1":
            assert problem.filters == 128
            channels += 32
            grown.setdefault(part[1], [0, 0])[0] += 1
        else:
            assert problem.filters * 2 == channels
            channels, size = problem.filters, (size[0] // 2, size[1] // 2)
            halved.append(channels)
    assert list(grown.values()) == [[6, 6], [12, 12], [24, 24], [16, 16]]
    assert halved == [128, 256, 512]
    assert (channels, size) == (1024, (7, 7))


def test_resnet1001_has_the_published_weights_in_three_stages_of_bottlenecks():
    network = load_network("resnet1001")
    assert sum(layer.count for layer in network.layers) == 1 + 3 * 111 * 3 + 3  # with the three projections
    weights = sum(prod(layer.forward.w_shape) * layer.count for layer in network.layers)
    assert round(weights / 1e6, 1) == 10.2
    channels, size = 16, 32
    for stage in (1, 2, 3):
        wide, stride = 32 * 2**stage, 1 if stage == 1 else 2
        output = size // stride
        block = {  # the layers of all bottlenecks of a stage: channels, size, filters, kernel, stride
            (channels, size, wide // 4, 1, stride): 1,
            (wide, output, wide // 4, 1, 1): 110,
            (wide // 4, output, wide // 4, 3, 1): 111,
            (wide // 4, output, wide, 1, 1): 111,
        }
        projection = channels, size, wide, 1, stride
        block[projection] = block.get(projection, 0) + 1
        assert block == {
            (each.channels, each.spatial[0], each.filters, each.kernel[0], each.stride[0]): layer.count
            for layer in network.layers
            for each in [layer.forward]
            if layer.name.startswith(f"l{stage}.")
        }
        channels, size = wide, output
    assert (channels, size) == (256, 8)


def pooled(size):
    """Return the size after a pooling or a convolution of 3 x 3 with a stride of 2."""
    return (size[0] - 1) // 2, (size[1] - 1) // 2


def test_the_channels_and_sizes_of_inceptions_stem_fit_together():
    network = load_network("inception3")
    grouped = {name for group in network.groups for branch in group for name in branch}
    stem = [layer.forward for layer in network.layers if layer.name not in grouped]
    assert [layer.forward for layer in network.layers[: len(stem)]] == stem
    assert [problem.spatial[0] for problem in stem] == [299, 149, 147, 73, 73]
    for before, after in pairwise(stem):
        assert after.channels == before.filters
        assert after.spatial in (before.output, pooled(before.output))
    first = network.layers[len(stem)].forward
    assert (first.channels, first.spatial) == (stem[-1].filters, pooled(stem[-1].output))


def test_groups_name_each_layer_once_and_layers_of_equal_shape_are_joined_unless_branches_need_them():
    for name in NETWORKS:
        network = load_network(name)
        assert network.groups or len({layer.forward for layer in network.layers}) == len(network.layers)
        names = [layer for group in network.groups for branch in group for layer in branch]
        assert len(set(names)) == len(names)
        assert names == [layer.name for layer in network.layers if layer.name in names]
        assert bool(names) == (name == "inception3")
    inception = load_network("inception3")
    assert len({layer.name for layer in inception.layers}) == len(inception.layers)
    assert {layer.count for layer in inception.layers} == {1}
    assert [len(group) for group in inception.groups] == [4, 4, 4, 2, 4, 4, 4, 4, 2, 4, 4]


def test_the_channels_and_sizes_of_inceptions_modules_fit_together():
    network = load_network("inception3")
    problems = {layer.name: layer.forward for layer in network.layers}
    assert {each.kernel for each in problems.values()} == {(1, 1), (3, 3), (5, 5), (1, 7), (7, 1), (1, 3), (3, 1)}
    assert all(each.output == each.spatial for each in problems.values() if each.kernel[0] != each.kernel[1])
    expected = None  # channels and size of the next module's input
    for group in network.groups:
        given = problems[group[0][0]].channels, problems[group[0][0]].spatial
        assert given == (expected or given)
        outputs = []
        for branch in group:
            channels, size = given
            halves = 0
            for name in branch:
                problem = problems[name]
                assert (problem.channels, problem.spatial) == (channels, size)
                if name.endswith(("a", "b")):  # both halves read the same tensor, and their outputs are joined
                    halves += problem.filters
                else:
                    channels, size = problem.filters, problem.output
            outputs.append((halves or channels, size))
        if size != given[1]:  # a pooling branch without a convolution keeps all channels
            outputs.append((given[0], pooled(given[1])))
        assert len({size for _, size in outputs}) == 1
        expected = sum(channels for channels, _ in outputs), size
    assert expected == (2048, (8, 8))


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_networks_have_the_published_numbers_of_weights_and_multiplications(name):
    network = load_network(name, 1)
    assert sum(layer.count for layer in network.layers) == LAYERS[name]
    million = sum(layer.forward.multiplications * layer.count for layer in network.layers) / 1e6
    assert million == pytest.approx(PUBLISHED[name], rel=0.01)


def test_the_default_mini_batch_is_the_papers():
    papers = {"alexnet": 256, "vgg16": 64, "resnet18": 128, "resnet50": 32, "resnet1001": 128, "densenet121": 64}
    assert {name: load_network(name).batch for name in NETWORKS} == papers | {"unet3d": 4, "inception3": 64}


def test_kernels_come_in_three_operations():
    kernels = load_network("alexnet", 4).kernels()
    assert [kernel.operation for kernel in kernels[:3]] == list(Operation)
    assert len(kernels) == 15
    assert str(kernels[5]) == "conv2 (BackwardFilter)"


def write(tmp_path, *rows, header=CSV_HEADER):
    path = tmp_path / "layers.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return str(path)


@pytest.mark.parametrize("mark", ["", "\ufeff"])  # a byte order mark, as spreadsheets write it
def test_reads_a_table_of_layers(tmp_path, mark):
    rows = "DeepSpeech,700,161,1,4,32,20,5,0,0,2,2", ",28,27,3,8,16,3,5,1,2,1,3"
    network = load_network(write(tmp_path, *rows, header=mark + CSV_HEADER))
    assert (network.name, network.batch) == ("layers", None)
    first, second = network.layers
    assert (first.name, second.name) == ("DeepSpeech:1", "layers:2")
    assert first.forward.x_shape == (4, 1, 161, 700)
    assert first.forward.w_shape == (32, 1, 5, 20)
    assert first.forward.output == (79, 341)
    assert second.forward.padding == (2, 1)
    assert second.forward.stride == (3, 1)


def test_deepbench_is_a_table_of_layers_and_another_mini_batch_overrides_its_own():
    network, other = load_network(str(DEEPBENCH)), load_network(str(DEEPBENCH), 256)
    problems = [layer.forward for layer in network.layers]
    assert (network.name, len(problems)) == ("deepbench", len(set(problems)))
    assert {problem.batch for problem in problems} == {4, 8, 16, 32}
    sources = {"DeepSpeech", "OCR", "FaceRecognition", "Vision", "SpeakerID", "ResNet"}
    assert {layer.name.partition(":")[0] for layer in network.layers} == sources
    assert all(size >= 1 for problem in problems for size in problem.output)
    assert all(kernel.problem.multiplications > 0 for kernel in network.kernels())
    assert other.batch == 256
    assert [(layer.name, layer.forward) for layer in other.layers] == [
        (layer.name, layer.forward.with_batch(256)) for layer in network.layers
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,8,8,3,4,5,3,3,1,1,1", "stride_h None is no whole number"),
        ("a,8,8,three,4,5,3,3,1,1,1,1", ":2: C_in 'three' is no whole number"),
        ("a,8,8,3,-4,5,3,3,1,1,1,1", ":2: batch -4 must be 1 or more"),
        ("a,8,8,3,4,5,11,11,1,1,1,1", r":2: kernel \(11, 11\) .* does not fit"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, message):
    with pytest.raises(InvalidNetworkError, match=message):
        load_network(write(tmp_path, row))


def test_bad_files_are_named(tmp_path):
    with pytest.raises(InvalidNetworkError, match="column W is missing: the header must be source,W,H"):
        load_network(write(tmp_path, header="source,width"))
    with pytest.raises(InvalidNetworkError, match="has no layers"):
        load_network(write(tmp_path))
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidNetworkError, match=r"binary\.csv cannot be read"):
        load_network(str(binary))
    with pytest.raises(InvalidNetworkError, match="network 'lenet' is neither known nor a file: give one of alexnet"):
        load_network("lenet")
    with pytest.raises(InvalidProblemError, match="batch 0"):
        load_network("alexnet", 0)


@pytest.mark.parametrize("name", ["n" * 300, "a\0b", "x/" * 3000])
def test_names_that_no_file_can_have_are_refused(name):
    with pytest.raises(InvalidNetworkError, match=r"^network '.{1,90}"):
        load_network(name)


@pytest.mark.parametrize("cell", ["9" * 20, "9" * 5000, "x" * 5000])
def test_long_numbers_are_refused_in_a_short_line(tmp_path, cell):
    (tmp_path / "own.csv").write_text(f"{CSV_HEADER}\nonly,6,6,2,{cell},3,3,3,1,1,1,1\n")
    with pytest.raises(
        InvalidNetworkError, match=r"own.csv:2: .*(no whole number|more than the 2147483647)"
    ) as refused:
        load_network(str(tmp_path / "own.csv"))
    assert len(str(refused.value)) < 400
