"""Files of recorded steps with anything anywhere: exit status 0 or 2, one line of error, never a traceback."""

import copy
import gzip
import json
import math

from hypothesis import strategies as st

from tests.support.fuzzing import JSON, check, fuzz
from tests.support.step_graphs import StepBuilder
from ucudnn.memory.graph import Affine, Phase, Role
from ucudnn.memory.policies.catalog import POLICIES
from ucudnn.memory.step_file import encode_step
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
ODD = st.one_of(
    st.sampled_from(
        [None, True, -1, 0, 1, 2**31, 2**63, 10**400, 1.5, 1e308, math.inf, math.nan, "", "x", "\n", [], {}]
    ),
    st.sampled_from(["1", "activation", "forward", "float32", "\ud800", [0, 1], [1, -1], [[]], {"a": 1}]),
    st.integers(-4, 12),
    JSON,
)


WHOLES = st.one_of(st.integers(0, 12), st.sampled_from([-1, 2**31 - 1, 2**62, 2**63 - 1]))
NUMBERS = st.one_of(WHOLES, st.sampled_from([0.5, 1e-9, 1e-6, 1e6, 1e18]), st.floats(allow_nan=False))


def like(value):
    """Return what draws another value of the same type, which passes for one until its sense is asked for."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int | float):
        return WHOLES if isinstance(value, int) else NUMBERS
    if isinstance(value, str):
        return st.sampled_from(
            ["", "x", "a\nb", "\ud800", "\x1b[31m", "forward", "backward", "optimizer", "input", "n" * 300]
        )
    if isinstance(value, list):
        return st.one_of(st.permutations(value), st.just([]), st.just(value[1:]))
    return ODD


def places(value, path=()):
    """Yield the path of each value in a JSON value, itself first."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


@st.composite
def damaged_steps(draw):
    """Draw the small step with up to three values replaced, taken away or doubled."""
    content = copy.deepcopy(STEP)
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        parts = [*["operations", "storages", "problems", "measured"] * 4, *STEP]
        top = draw(st.sampled_from([part for part in parts if part in content]))
        *way, last = draw(st.sampled_from([(top, *path) for path in places(content[top])]))
        inside = content
        for key in way:
            inside = inside[key]
        how = draw(st.sampled_from([*["like"] * 8, "replace", "replace", "take", "double"]))
        if how in ("like", "replace"):
            values = like(inside[last]) if how == "like" else ODD
            inside[last] = copy.deepcopy(draw(values))  # of which a later turn may replace a part
        elif how == "double" and isinstance(inside, list):
            inside.insert(last, copy.deepcopy(inside[last]))
        elif len(content) > 1:
            del inside[last]
    return json.dumps(content)


DEEP = st.integers(1, 100_000).map(lambda depth: '{"format": "ucudnn-step", "version": 1, "name": ' + "[" * depth)
TEXTS = st.one_of(st.text(st.characters(max_codepoint=255), max_size=200), DEEP, st.just("9" * 5000))


@st.composite
def step_files(draw):
    """Draw a command line, and the bytes of the file that it reads, as a text of latin-1."""
    words = draw(step_lines())
    data = draw(TEXTS if draw(st.integers(0, 15)) == 0 else damaged_steps()).encode("latin-1")
    if draw(st.integers(0, 9)) == 0:
        data = gzip.compress(data, mtime=0)
        data = draw(st.sampled_from([data, data, data[:-9], data[:20] + b"\xff" + data[21:], data + b"x"]))
    return words, data.decode("latin-1")


@st.composite
def step_lines(draw):
    """Draw a command line about the file own.json."""
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
