import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.problems import DIFFERENT, make_problem
from tests.support.saved_files import save_profile
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.replay import ReplayBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.recording import NO_LIMIT
from ucudnn.benchmarking.request import Request
from ucudnn.errors import ProfileError
from ucudnn.networks.tables import load_network
from ucudnn.networks.variants import variants
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import DataType, Layout, Operation
from ucudnn.profiles import format as profile_format
from ucudnn.profiles.format import Profile, count_records, load_profile
from ucudnn.profiles.measurement import Algorithm, Measurement
from ucudnn.solvers.desirable import desirable_set

RECORD = Measurement(
    algorithm=Algorithm(name="eng1", workspace_bytes=16, api="graph", notes=("FFT",)), time_ms=0.5, spread_ms=0.25
)
GEMM = Measurement(algorithm=Algorithm(name="GEMM", workspace_bytes=0, api="legacy"), time_ms=1.25)


def make_profile():
    everything_else = make_problem(
        **(DIFFERENT | {"batch": 2, "layout": Layout.NCHW, "float32_sum": False, "biased": False})
    )
    gradient = make_problem(operation=Operation.BACKWARD_FILTER, dtype=DataType.FLOAT16)
    last = make_problem(layout=Layout.NHWC)
    return Profile(
        name="test",
        conditions={"device": "a device", "cudnn": "9"},
        recordings={
            "one": {
                make_problem(): (RECORD, GEMM),
                make_problem(batch=4): (RECORD,),
                everything_else: (RECORD,),
                last: (RECORD,),
                make_problem(biased=True): (RECORD,),
            },
            "two": {
                make_problem(operation=Operation.BACKWARD_FILTER): (RECORD,),
                gradient: (RECORD,),
                replace(gradient, float32_sum=True): (GEMM,),
            },
        },
    )


@pytest.mark.parametrize(("name", "begin"), [("profile.json", b"{"), ("profile.json.gz", b"\x1f\x8b")])
def test_a_loaded_profile_equals_the_saved_one_which_is_compressed_by_its_name(tmp_path, name, begin):
    path = tmp_path / name
    save_profile(make_profile(), path)
    assert path.read_bytes().startswith(begin)
    loaded = load_profile(str(path))
    assert loaded.recordings == make_profile().recordings
    assert loaded.conditions == make_profile().conditions


@pytest.mark.parametrize("network", ["alexnet", "vgg16", "resnet18", "resnet50", "unet3d"])
def test_the_shipped_profile_has_configurations_for_every_kernel_of_its_networks(network):
    shipped = load_profile("h200")
    assert shipped.conditions["device"] == "NVIDIA H200"
    benchmark = Benchmark(ReplayBackend(shipped, candidates=Candidates.GRAPH, network=network))
    for variant in variants(["float32", "float16"], ["tf32", "fma"], ["first", "last"]):
        for kernel in variant.of_network(load_network(network)).kernels():
            for policy in (BatchSizePolicy.UNDIVIDED, BatchSizePolicy.POWER_OF_TWO):
                sizes = policy.sizes(kernel.problem.batch)
                request = Request(problem=kernel.problem, sizes=sizes, limit_bytes=NO_LIMIT)
                found = desirable_set(benchmark.micro_configurations(request), kernel.problem.batch)
                assert found, f"{policy.value} {kernel.problem}"


def damaged(tmp_path, change):
    path = tmp_path / "profile.json"
    save_profile(make_profile(), path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return str(path)


def sized(content, size):
    """Give the rows of a problem's second size to another size."""
    rows = next(each["rows"] for each in content["recordings"]["one"] if len(each["rows"]) > 1)
    rows[size] = rows.pop([*rows][1])


def first_row(content):
    return content["recordings"]["one"][0]["rows"]["8"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(format="other"), "format is not 'ucudnn-profile'"),
        (
            lambda content: content.update(version=4),
            "version 4 is not version 3, .* `ucudnn profile NETWORK --out FILE`",
        ),
        (lambda content: content.update(version=2), "version 2 is not version 3, .* or use the ucudnn that wrote it"),
        (lambda content: content.update(columns=["time_ms"]), r"columns \['time_ms'\] are not \['algorithm', "),
        (lambda content: content.pop("recordings"), "cannot be read: KeyError: 'recordings'"),
        (lambda content: first_row(content).__setitem__(1, float("nan")), "eng1 took nan ms, which is no time"),
        (lambda content: first_row(content).__setitem__(1, 0), "eng1 took 0 ms, which is no time"),
        (lambda content: first_row(content).__setitem__(1, "fast"), "eng1 took fast ms, which is no time"),
        (lambda content: first_row(content).__setitem__(-1, -1), "workspace of eng1 -1 is no whole number from 0"),
        (lambda content: first_row(content).__setitem__(0, 99), "cannot be read: IndexError"),
        (lambda content: content["recordings"]["one"][0]["problem"].update(stride=[0, 1]), r"stride \(0, 1\) must be"),
        (lambda content: sized(content, "0"), r"batch 0 must be 1 or more"),
        (lambda content: sized(content, str(2**31)), r"batch 2147483648 is more than"),
        (lambda content: sized(content, "many"), "cannot be read: ValueError"),
        (lambda content: content["recordings"]["one"][0]["problem"].update(operation="Sideways"), "Sideways"),
        (lambda content: content["recordings"]["one"][0]["problem"].update(colour="red"), "cannot be read: TypeError"),
    ],
)
def test_a_damaged_profile_is_refused_by_name(tmp_path, change, message):
    path = damaged(tmp_path, change)
    with pytest.raises(ProfileError, match=message) as caught:
        load_profile(path)
    assert path in str(caught.value)


def test_a_profile_that_ships_is_small_and_read_once_and_a_file_anew(tmp_path, h200_every):
    folder = Path(profile_format.__file__).parent
    assert all(path.stat().st_size < 2 * 2**20 for path in folder.iterdir() if path.is_file())
    assert load_profile("h200") is load_profile("h200")
    path = tmp_path / "own.json"
    save_profile(make_profile(), path)
    assert load_profile(str(path)) is not load_profile(str(path))
    assert count_records(load_profile(str(h200_every))) == 31877  # what the other tests compare with


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("b200", "profile 'b200' is neither a file nor one that ships with ucudnn: .*h200"),
        ("p" * 300, "^profile 'ppp.* cannot be read: File name too long"),
    ],
)
def test_a_name_of_no_profile_is_refused(name, message):
    with pytest.raises(ProfileError, match=message):
        load_profile(name)


@pytest.mark.parametrize(
    "damaged",
    [
        *("", "\x1f\x8b\x08\x00no gzip", "[1, 2]", "{", "\xff\xfe", "[" * 100_000),
        gzip.compress(b"{}", mtime=0)[:-9].decode("latin-1"),  # cut off
        lambda text: text.replace("0.5,", "1e308,"),
        lambda text: text.replace("0.5,", "1e999,"),
        lambda text: text.replace('"eng1"', '["eng1"]'),
        lambda text: text.replace('"eng1"', "7"),
        lambda text: text.replace('"1":', '"' + "9" * 5000 + '":').replace('"2":', '"' + "9" * 30 + '":'),
    ],
)
def test_a_damaged_profile_is_refused_in_one_line(tmp_path, damaged):
    path = tmp_path / "own.json"
    save_profile(make_profile(), path)
    text = path.read_text()
    content = damaged if isinstance(damaged, str) else damaged(text)
    assert content != text
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ProfileError, match=r"^profile .*own\.json") as refused:
        load_profile(str(path))
    assert len(str(refused.value)) < 600
    assert "\n" not in str(refused.value)
