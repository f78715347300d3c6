"""Commands that train or record a model in PyTorch, and the arguments of `fit`: an answer, or an error that says why.

What a command line promises is in `tests.support.fuzzing`. `fit` returns a step that runs, or raises a UcudnnError.
"""

import math
import re
import signal
from pathlib import Path
from traceback import extract_tb

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

from tests.support.fuzzing import DIGITS, LINKS, NUMBERS, OUTPUTS, SIZES, STREAMS, VALUES, check, fuzz, texts
from ucudnn.errors import UcudnnError
from ucudnn.memory.policies.catalog import POLICIES
from ucudnn.memory.torch.running.fit import fit
from ucudnn.settings import VARIABLES

pytestmark = pytest.mark.usefixtures("older_objects_frozen")

UNET, GPT = "tests.support.training_steps:small_unet", "tests.support.training_steps:small_gpt"
BROKEN = "tests.support.broken_models"
GOOD = {  # models with what each takes
    UNET: ["--shape", "3x16x16"],
    GPT: ["--shape", "16", "--tokens"],
    f"{BROKEN}:plain": ["--shape", "3x8x8"],
    f"{BROKEN}:Printing": ["--shape", "3x8x8"],
    f"{BROKEN}:Writing": ["--shape", "3x8x8"],
    f"{BROKEN}:Diverging": ["--shape", "3x8x8"],
}
BAD = [
    *(f"{BROKEN}:{name}" for name in texts("Refusing Leaving Backwards Untrained OfOneBatch Empty vast nn.Identity")),
    *texts(": a: :b json:loads sys:exit math:pi no.such:model torch:add tests.support:x torch.nn:Module torch.nn:ReLU"),
    *("", "\ud800:x", "builtins:object", "n" * 300 + ":x"),
]
GOODS = st.sampled_from([*GOOD])
SHAPES = st.sampled_from(
    ["", *texts("3x8x8 3,8,8 8 3x0x8 -3x8x8 3x8x8x8 3x8x8x8x8 3x2147483647x2147483647 x ٣x8x8 3X8X8")]
)
LOSSES = st.sampled_from(
    ["", *texts(f"mse cross-entropy hinge math:sqrt torch:add {BROKEN}:printing_loss torch.nn:MSELoss a:b")]
)
OPTIONS = {
    "--batch": st.one_of(st.integers(1, 5).map(str), NUMBERS, DIGITS),
    "--loss": LOSSES,
    "--optimizer": st.one_of(st.sampled_from(["sgd", "adam", "adamw", "none", "lion", ""]), VALUES),
    "--dtype": st.one_of(st.sampled_from(["float32", "float16", "bfloat16", "float64", "int8", ""]), VALUES),
    "--math": st.sampled_from(["tf32", "fma", "", "x"]),
    "--layout": st.sampled_from(["first", "last", "NHWC", "", "x"]),
    "--autocast": st.sampled_from(["bfloat16", "float16", "float32", "", " BFLOAT16 ", "x"]),
}


MOST_SECONDS = 90
"""The most that a command may take: it imports PyTorch, and so does the process of a policy."""


@st.composite
def subjects(draw):
    model = draw(st.one_of(GOODS, GOODS, GOODS, st.sampled_from(BAD)))
    words = [model, *GOOD.get(model, ["--shape", "3x8x8"])]
    if draw(st.integers(0, 4)) == 0:
        words[2] = draw(SHAPES)
    given = draw(st.lists(st.sampled_from([*OPTIONS]), max_size=3, unique=True))
    if "--batch" not in given:  # 32 samples take longer
        words += ["--batch", "2"]
    for name in given:
        words += [name, draw(OPTIONS[name])]
    return words


@st.composite
def recordings(draw):
    """Draw a command line that records a model, or explains it at once."""
    if draw(st.integers(0, 3)) == 0:
        words = ["memory", draw(st.sampled_from(["why", "plan"])), *draw(subjects()), "--json"]
    else:
        out = draw(st.sampled_from(["step.json", "step.json.gz", "/", "", "x/y.json", "/dev/full", "n" * 300]))
        words = ["memory", "record", *draw(subjects()), "--out", out]
        words += ["--measure", draw(st.sampled_from(["none", "cpu", "auto", "cuda", "", "CPU"]))]
    words += draw(st.sampled_from([[], [], ["--keep-gradients"], ["--tokens"]]))
    return [word.replace("\0", "\\0") for word in words]


@st.composite
def runs(draw):
    """Draw a command line that trains a model with one policy, because each has a process of its own."""
    policy = draw(st.sampled_from([*POLICIES, "pytorch", "auto", "vdnn", "vdnn-ext", "", "x", "pytorch,,"]))
    words = ["memory", "run", *draw(subjects()), "--policy", policy]
    words += ["--on", draw(st.sampled_from(["cpu", "cpu", "cpu", "auto", "cuda", ""]))]
    words += ["--steps", draw(st.sampled_from(texts("1 1 2 0 -1 x")))]
    offered = {
        "--budget": st.one_of(SIZES, st.sampled_from(["1GiB", "100KB", "310KB", "1KiB"]), DIGITS),
        "--convolutions": st.sampled_from(["undivided", "", "x"]),
        "--timeline": st.sampled_from(["x.svg", "x.png", "x", "", "/", "x/y.svg"]),
    }
    for name, values in offered.items():
        if draw(st.integers(0, 3)) == 0:
            words += [name, draw(values)]
    words += draw(st.sampled_from([[], ["--cap"], ["--tokens"], ["--json"], ["--json"]]))
    return [word.replace("\0", "\\0") for word in words]


ENVIRONMENTS = st.dictionaries(st.sampled_from(sorted(VARIABLES.values())), VALUES.filter(str.isprintable), max_size=2)


@st.composite
def series(draw):
    """Draw a command line that trains a model with several policies, and where it runs."""
    names = [*POLICIES, *texts("pytorch auto vdnn vdnn-ext stock stock x STOCK"), " checkpoint ", "", "n" * 300]
    policies = ",".join(draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)))
    words = ["memory", "run", *draw(subjects()), "--policy", policies, "--on", "cpu", "--steps", "1"]
    offered = {
        "--budget": st.one_of(SIZES, st.sampled_from(["1 gib", *texts("1GiB 100KB 310KB 1KiB ٣KiB +1GiB 1e9")])),
        "--convolutions": st.sampled_from(["undivided", "powerOfTwo", "ALL", "adaptive", "", "x"]),
        "--timeline": OUTPUTS,
    }
    for name, values in offered.items():
        if draw(st.integers(0, 2)) == 0:
            words += [name, draw(values)]
    words += draw(st.sampled_from([[], ["--cap"], ["--json"], ["--json"]]))
    how = {"stdout": draw(STREAMS), "environment": draw(ENVIRONMENTS), "links": LINKS}
    return [word.replace("\0", "\\0") for word in words], how


@st.composite
def interrupted(draw):
    model = draw(GOODS)
    words = ["memory", draw(st.sampled_from(["record", "why", "plan", "run"])), model, *GOOD[model], "--batch", "2"]
    words += {
        "record": ["--out", "step.json.gz", "--measure", draw(st.sampled_from(["none", "cpu"]))],
        "why": ["--plot", "x.svg"],
        "plan": ["--policy", "stock", "--timeline", "x.svg", "--addresses", "y.svg", "--snapshot", "z.pickle"],
        "run": ["--policy", "checkpoint,vdnn-all-p", "--on", "cpu", "--steps", "1"],
    }[words[1]]
    return words, draw(st.one_of(st.integers(100, 200_000), st.integers(200_000, 1_000_000)))


@fuzz(series())
def test_any_run_of_several_policies(run, example):
    words, how = example
    check(run(words, here=True, most_seconds=MOST_SECONDS, **how), example)


_IGNORED = re.compile(r"Exception ignored .*\nTraceback \(most recent call last\):\n(?: .*\n)+KeyboardInterrupt.*\n")
"""What Python says where Ctrl-C comes while it ends a generator or drops an object: it goes on then."""


@fuzz(interrupted())
def test_ctrl_c_at_any_time(run, example):
    words, call = example
    answer = run(words, here=True, most_seconds=MOST_SECONDS, interrupted=call)
    # Seen once: the process aborts, which no Python of a command does, but libraries in C++ may. Others forget Ctrl-C
    # while they are imported, and fail; then the command names what it lacks.
    assert answer["status"] in (0, 2, 130, -signal.SIGABRT), (example, answer)
    said = _IGNORED.sub("", answer["error"])
    check(answer | {"status": 0, "error": said}, words)


@fuzz(recordings())
def test_any_recording_of_a_model(run, example):
    check(run(example, most_seconds=MOST_SECONDS), example)


@fuzz(runs())
def test_any_run_of_a_model(run, example):
    check(run(example, most_seconds=MOST_SECONDS), example)


def small_model():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


_SIZES = (None, "1GiB", "64MiB", 10**9, np.int64(10**8), 0, 1, -1, 2**63, 1.5, math.nan, True, "", b"1GiB", [], "1e9")
BYTES = st.one_of(st.sampled_from(_SIZES), st.integers(-2, 10**6), SIZES)
_POLICIES = ("auto", "vdnn", "", "x", None, 7, b"stock", [], type, POLICIES)
_MAPPINGS = (
    {"policy": "undivided"},
    {"policy": "x"},
    {"a": 1},
    {1: 2},
    {"names": 3},
    {"environment": 3},
    {"effort": 3},
)
FIT = {
    "budget": BYTES,
    "host_memory": BYTES,
    "policy": st.sampled_from([*POLICIES, *POLICIES.values(), *_POLICIES]),
    "keep_gradients": st.sampled_from([True, False, None, 1, "yes"]),
    "debug": st.sampled_from([True, False, None, 1]),
    "convolutions": st.sampled_from([None, None, "undivided", "", "x", 7, [], *_MAPPINGS, {"backend": "x"}]),
}


@st.composite
def fits(draw):
    given = draw(st.lists(st.sampled_from([*FIT]), max_size=3, unique=True))
    options = {name: draw(FIT[name]) for name in given}
    options.setdefault("policy", "stock")
    how = draw(st.sampled_from(texts("sgd adam several none class odd")))
    loss = draw(st.sampled_from([nn.functional.cross_entropy, nn.CrossEntropyLoss(), None, 7, "cross-entropy"]))
    form = draw(st.sampled_from(texts("tuple list alone empty none numpy text mapping more")))
    return options, how, loss, form


def optimizer_of(how, parameters):
    if how == "several":
        return [torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.Adam(parameters[2:])]
    made = {"sgd": lambda: torch.optim.SGD(parameters, lr=0.1), "adam": lambda: torch.optim.AdamW(parameters)}
    return made.get(how, lambda: {"class": torch.optim.SGD, "odd": "sgd"}.get(how))()


def sample_of(form):
    x, labels = torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)
    return {
        "tuple": (x, labels),
        "list": [x, labels],
        "alone": x,
        "empty": (),
        "none": None,
        "numpy": (x.numpy(), labels),
        "text": "3x8x8",
        "mapping": {"input": x},
        "more": (x, labels, labels),
    }[form]


def is_the_models_own(error):
    """Return whether a model or a loss raised an error, as it does of arguments that it does not take."""
    return any(Path(frame.filename).match("torch/nn/modules/module.py") for frame in extract_tb(error.__traceback__))


@pytest.mark.filterwarnings("ignore:budget=.* bytes. write")
@fuzz(fits())
def test_any_arguments_of_fit(example):
    options, how, loss, form = example
    model, sample = small_model(), sample_of(form)
    try:
        step = fit(model, sample, loss, optimizer_of(how, [*model.parameters()]), **options)
    except UcudnnError:
        return
    except (TypeError, RuntimeError) as error:
        if (form in ("tuple", "list") and loss is not None) or not is_the_models_own(error):
            raise
        return
    if isinstance(sample, dict):
        found = step(**sample)
    else:
        found = step(*sample) if isinstance(sample, tuple | list) else step(sample)
    found.sum().backward()
    assert all(each.grad is not None for each in model.parameters())


def test_models_and_arguments_that_are_right_are_taken(run):
    lines = [["memory", "why", model, *words, "--batch", "2", "--json"] for model, words in GOOD.items()]
    trained = texts("--batch 2 --steps 1 --on cpu --policy stock")
    for line in [*lines, ["memory", "run", UNET, *GOOD[UNET], *trained]]:
        answer = run(line, most_seconds=MOST_SECONDS)
        assert (answer["raised"], answer["status"]) == ("", 0), answer["error"]
    model, sample = small_model(), sample_of("tuple")
    optimizer = optimizer_of("adam", [*model.parameters()])
    fit(model, sample, nn.functional.cross_entropy, optimizer, "1GiB")(*sample).backward()
