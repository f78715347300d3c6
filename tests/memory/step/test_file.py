"""Tests of recorded steps in files: what is written is read again, and what cannot be read is named."""

import gzip
import json
import re

import pytest

from tests.support.saved_files import save_step
from tests.support.step_graphs import StepBuilder
from ucudnn.errors import StepFileError, StepFileVersionError
from ucudnn.memory.step.costs import ScratchPieces
from ucudnn.memory.step.file import decode_step, encode_step, load_measured_step, load_step
from ucudnn.memory.step.graph import Affine, Role, Storage
from ucudnn.problem import ConvolutionProblem, DataType, Operation


def recorded_step():
    problem = ConvolutionProblem(
        operation=Operation.FORWARD,
        batch=4,
        channels=3,
        spatial=(9, 9),
        filters=4,
        kernel=(3, 3),
        padding=(1, 1),
        stride=(2, 2),
        dtype=DataType.FLOAT16,
    )
    builder = StepBuilder().storage("x", 7, Role.INPUT, fixed=3).storage("w", 0, Role.PARAMETER, fixed=100)
    builder.run("conv", "x w", "y", problem=problem, problem_batch=Affine(1, 2), flops=Affine(5, 6), traffic=Affine(7))
    relu = {"dtype": "float16", "module": "layer1.relu", "source": "model.py:12", "repeatable": False}
    builder.run("relu_", "y", "y", **relu)
    builder.storages["y"] = Storage(name="y", role=Role.ACTIVATION, size=Affine(0, 9), aliases=("y", "y_view"))
    builder.backward("grad", "x y", "dy")
    return builder.graph(batch=4, name="model", recorded=(2, 4), gradients_kept=True, conditions={"torch": "2.13"})


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_a_step_is_read_as_it_was_written(tmp_path, name):
    graph = recorded_step()
    save_step(graph, tmp_path / name)
    assert load_step(tmp_path / name) == graph
    assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_what_was_measured_is_read_as_it_was_written(tmp_path, name):
    builder = StepBuilder().run("a", "", "y", time=1.5, scratch=7).run("b", "y", "z", time=0.25)
    pieces = {0: ScratchPieces((3, -2, -1, 4)), 1: ScratchPieces((-1, 1, 2), (5,))}
    given = {"granularity": 512, "contention": 1.16, "issue_ms": (0.5, 0.25), "scratch_pieces": pieces}
    graph, measured = builder.graph(), builder.costs(**given)
    save_step(graph, tmp_path / name, measured)
    found = load_measured_step(tmp_path / name)[1]
    assert found == measured
    assert found.scratch_pieces == pieces
    assert load_step(tmp_path / name) == graph
    save_step(graph, tmp_path / name)
    assert load_measured_step(tmp_path / name)[1] is None


def test_measurements_of_another_step_are_refused(tmp_path):
    builder = StepBuilder().run("a", "", "y").run("b", "y", "z")
    costs = builder.costs()
    save_step(builder.run("c", "z", "u").graph(), tmp_path / "step.json", costs)
    with pytest.raises(StepFileError, match="2 operations were measured of 3"):
        load_measured_step(tmp_path / "step.json")


def test_the_same_step_makes_the_same_file(tmp_path):
    for name in ("a.json.gz", "b.json.gz"):
        save_step(recorded_step(), tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_each_operation_and_each_storage_has_a_line_of_its_own():
    lines = encode_step(recorded_step()).decode().splitlines()
    assert len([line for line in lines if line.startswith('["relu_"')]) == 1
    assert len([line for line in lines if line.startswith('["dy"')]) == 1


def test_a_step_of_another_version_is_refused():
    content = json.loads(encode_step(recorded_step()))
    content["version"] = 2
    with pytest.raises(StepFileVersionError, match="step here has version 2, this ucudnn reads version 1"):
        decode_step(json.dumps(content).encode(), "here")


def damaged(**changes):
    return json.dumps(json.loads(encode_step(recorded_step())) | changes).encode()


def changed(row, place, value):
    """Return the bytes of a step with another value in the row of an operation."""
    rows = json.loads(encode_step(recorded_step()))["operations"]
    rows[row][place] = value
    return damaged(operations=rows)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{}", "format is not 'ucudnn-step': record one with `ucudnn memory record`"),
        (b"[1]", "format is not"),
        (b"no JSON", "cannot be read: JSONDecodeError"),
        (b"\xff", "cannot be read: UnicodeDecodeError"),
        (gzip.compress(b"{}", mtime=0)[:-4], "cannot be read: EOFError"),
        (b"\x1f\x8b broken", "cannot be read"),
        (damaged(storages=[]), "accesses storages"),
        (damaged(storages=[["x", "nobody", 1, 1, []]]), "'nobody' is not a valid Role"),
        (damaged(operations=[["conv"]]), "ValueError"),
        (damaged(operations=[["conv", 99, "forward", 0, [], [], [0, 0], [0, 0], 0, 0, 1]]), "IndexError"),
        (damaged(problems=[{"operation": "Forward"}]), "cannot be read: TypeError"),
        (damaged(batch=0), "a mini-batch of 0"),
        (damaged(batch="8"), "a mini-batch of '8'"),
        (damaged(batch=10**400), r"a mini-batch of 10+\.\.\. is not 1 to 2147483647"),
        (b'{"format": ' + b"[" * 100_000, "cannot be read: RecursionError"),
        (damaged(name=7), "name 7 is no text"),
        (damaged(kinds=[{}]), "table of kinds {} is no text"),
        (damaged(sources=[None] * 9), "table of sources None is no text"),
        (damaged(recorded=[[4]]), r"recorded mini-batch \[4\] is no whole number from 1 to"),
        (damaged(recorded=4), "recorded mini-batch 4 is no list"),
        (damaged(conditions={"matmul": 1}), "condition matmul 1 is no text"),
        (damaged(conditions=["tf32"]), r"condition \['tf32'\] is no object"),
        (damaged(gradients_kept="no"), "gradients_kept 'no' is not true or false"),
        (damaged(storages=[[0, "input", 1, 1, []]]), "name of a storage 0 is no text"),
        (damaged(storages=[["x", "input", 1.5, 1, []]]), "size of x 1.5 is no whole number from -9223372036854775807"),
        (damaged(storages=[["x", "input", 2**63, 1, []]]), "size of x 9223372036854775808 is no whole number"),
        (damaged(storages=[["x", "input", 1, 1, "yz"]]), "alias of x 'yz' is no list"),
        (changed(0, 1, -1), "row of a kind -1 is no whole number from 0"),
        (changed(0, 4, [True]), "storage that conv reads True is no whole number"),
        (changed(0, 6, ["1", 2]), "operations of conv '1' is no whole number"),
        (changed(0, 7, "12"), "traffic of conv '12' is no list"),
        (changed(0, 10, 2), "whether conv is repeatable, 2 is no whole number from 0 to 1"),
        (changed(0, 11, -1), "row of a problem -1 is no whole number from 0"),
        (changed(0, 2, "optimizer"), r"operation 1 \(relu_, layer1.relu\) belongs to forward, and an operation before"),
    ],
)
def test_what_cannot_be_read_is_named(data, message):
    with pytest.raises(StepFileError, match=message) as caught:
        decode_step(data, "here")
    assert str(caught.value).startswith("step here")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("device", 1, "measured device 1 is no text"),
        ("time_ms", ["1", 1], "measured time_ms '1' is no number from 0 to 1e+18"),
        ("time_ms", [1e308, 1], "measured time_ms 1e+308 is no number"),
        ("scratch_bytes", [0.5, 1], "measured scratch_bytes 0.5 is no whole number"),
        ("scratch_bytes", [1], "1 operations were measured of 2"),
        ("scratch_pieces", 1, "measured scratch_pieces 1 is no list"),
        ("scratch_pieces", [[0, [1]]], "cannot be read: ValueError"),
        ("scratch_pieces", [[0, [0.5], []]], "measured scratch_pieces 0.5 is no whole number"),
        ("scratch_pieces", [[0, [1], [-2]]], "measured scratch_pieces -2 is no whole number"),
        ("scratch_pieces", [[0, [1], [], []]], "cannot be read: ValueError"),
        ("issue_ms", [1], "1 operations were measured of 2"),
        ("issue_ms", [-1, 1], "measured issue_ms -1 is no number from 0 to 1e+18"),
        ("memory_bytes", None, "measured memory_bytes None is no whole number"),
        ("granularity", 512.0, "measured granularity 512.0 is no whole number"),
        ("offload_bytes_per_ms", 1e-300, "measured offload_bytes_per_ms 1e-300 is no number from 1e-06"),
        ("prefetch_bytes_per_ms", float("inf"), "measured prefetch_bytes_per_ms inf is no number"),
        ("duplex", 2, "duplex 2 is not above 0 and at most 1"),
        ("speed", 2, "cannot be read: TypeError"),
        (None, [1], "cannot be read: TypeError"),
    ],
)
def test_measurements_that_make_no_sense_are_named(tmp_path, name, value, message):
    builder, path = StepBuilder().run("a", "", "y").run("b", "y", "z"), tmp_path / "step.json"
    content = json.loads(encode_step(builder.graph(), builder.costs()))
    content["measured"] = value if name is None else content["measured"] | {name: value}
    path.write_text(json.dumps(content))
    with pytest.raises(StepFileError, match=re.escape(message)) as caught:
        load_measured_step(path)
    assert str(caught.value).startswith(f"step {path}")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(StepFileError, match=r"nowhere\.json cannot be read: No such file"):
        load_step(tmp_path / "nowhere.json")
