"""Device profiles with anything anywhere: exit status 0 or 2, one line of error, never a traceback."""

import json
from importlib import resources
from itertools import count

from hypothesis import strategies as st

from tests.support.fuzzing import check, damaged, fuzz

FILES = resources.files("ucudnn.memory.devices")
DEVICES = [json.loads((FILES / f"{name}.json").read_text()) for name in ("h200", "titan-x")]
OFTEN = ("link", "matrix", "convolution", "granularity", "memory_bytes", "recorded")
NUMBERS = count()
"""Each file has another name, because a process keeps what it has read of a device."""


@st.composite
def device_lines(draw):
    """Draw a command line about a step that ships, but for its device, and the text of the device's file."""
    words = ["memory", draw(st.sampled_from(["why", "plan"])), draw(st.sampled_from(["alexnet", "vgg16"]))]
    if words[1] == "plan":
        words += ["--policy", draw(st.sampled_from(["stock", "vdnn-all-p", "swap-hidden"]))]
    words += draw(st.sampled_from([[], ["--json"], ["--algorithms", "smallest"]]))
    return words, draw(damaged(draw(st.sampled_from(DEVICES)), OFTEN))


@fuzz(device_lines())
def test_any_device(run, example):
    words, text = example
    name = f"device{next(NUMBERS)}.json"
    check(run([*words, "--device", name], files={name: text}), [*words, text])
