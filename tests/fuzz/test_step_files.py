"""Files of recorded steps with anything anywhere: exit status 0 or 2, one line of error, never a traceback."""

import gzip
import json

from hypothesis import strategies as st

from tests.support.fuzzing import check, damaged, fuzz
from tests.support.step_graphs import StepBuilder
from ucudnn.memory.policies.catalog import POLICIES
from ucudnn.memory.step.file import encode_step
from ucudnn.memory.step.graph import Affine, Phase, Role
from ucudnn.problem import ConvolutionProblem, Operation


def small_step():
    """Return the content of a file with a convolution, a view, a backward half, an optimizer and what was measured."""
    problem = ConvolutionProblem(
        operation=Operation.FORWARD, batch=4, channels=3, spatial=(9, 9), filters=4, kernel=(3, 3), padding=(1, 1)
    )
    names = {"dtype": "float32", "module": "layer1", "source": "model.py:12"}
    builder = StepBuilder().storage("x", 972, Role.INPUT).storage("w", 0, Role.PARAMETER, fixed=432)
    builder.storage("dw", 0, Role.GRADIENT, fixed=432).storage("m", 0, Role.OPTIMIZER_STATE, fixed=432)
    sizes = {"flops": Affine(0, 17496), "traffic": Affine(432, 2268)}
    builder.run("convolution", "x w", "y", problem=problem, **sizes, **names).run("view", **names)
    builder.run("relu", "y", "z", scratch=64, **names).storage("loss", 0, Role.OUTPUT, fixed=4).run("mean", "z", "loss")
    builder.backward("relu_backward", "z loss", "dy", **names).backward("filter", "x dy", "dw", scratch=4096)
    builder.run("update", "w dw m", "w m", phase=Phase.OPTIMIZER)
    graph = builder.graph(batch=4, name="small", recorded=(4, 8), conditions={"torch": "2.13"})
    return json.loads(encode_step(graph, builder.costs(granularity=512, contention=1.25)))


STEP = small_step()
OFTEN = ("operations", "storages", "problems", "measured")


DEEP = st.integers(1, 100_000).map(lambda depth: '{"format": "ucudnn-step", "version": 1, "name": ' + "[" * depth)
TEXTS = st.one_of(st.text(st.characters(max_codepoint=255), max_size=200), DEEP, st.just("9" * 5000))


@st.composite
def step_files(draw):
    """Draw a command line, and the bytes of the file that it reads, as a text of latin-1."""
    words = draw(step_lines())
    data = draw(TEXTS if draw(st.integers(0, 15)) == 0 else damaged(STEP, OFTEN)).encode("latin-1")
    if draw(st.integers(0, 9)) == 0:
        data = gzip.compress(data, mtime=0)
        data = draw(st.sampled_from([data, data, data[:-9], data[:20] + b"\xff" + data[21:], data + b"x"]))
    return words, data.decode("latin-1")


@st.composite
def step_lines(draw):
    command = draw(st.sampled_from(["why", "plan", "plan", "front"]))
    words = ["memory", command.replace("front", "plan"), "own.json"]
    if command != "why":
        words += ["--policy", draw(st.sampled_from([*POLICIES, "vdnn-ext,dymem"]))]
    if command == "front":
        words += ["--front", "--points", "3"]
    elif draw(st.booleans()):
        words += ["--budget", draw(st.sampled_from(["0", "1KiB", "8KiB", "16KiB", "40GiB", str(2**63 - 1)]))]
    for option, values in (("--batch", ["1", "8", str(2**31 - 1), "9" * 400]), ("--device", ["h200", "titan-x"])):
        if draw(st.integers(0, 2)) == 0:
            words += [option, draw(st.sampled_from(values))]
    return words + draw(st.sampled_from([[], ["--json"]]))


@fuzz(step_files())
def test_any_file_of_a_step(run, example):
    words, text = example
    check(run(words, files={"own.json": text}), [*words, text])


def test_the_step_that_is_damaged_is_planned_for_where_it_is_whole(run):
    for words in (["why"], ["plan", "--policy", "vdnn-all-p", "--json"], ["plan", "--policy", "stock", "--front"]):
        answer = run(["memory", words[0], "own.json", *words[1:]], files={"own.json": json.dumps(STEP)})
        assert (answer["raised"], answer["status"], answer["error"]) == ("", 0, "")
