"""What a document shows and what a command prints: words and columns must be the same, numbers may differ."""

import re

_CPU_ALGORITHM = r"(?:IMPLICIT_GEMM|GEMM|FFT_TILING|FFT|WINOGRAD_[24]X[24])"
_PART = rf"\d+x\d+ (?:{_CPU_ALGORITHM}|\[[^\]…]*(?:\]|…))"  # a long one ends with …
_MASKS = (  # in this order; what a machine or a clock decides
    (rf"{_PART}(?: \+ {_PART})*(?:[^…]*…)?", "CONFIGURATION"),
    (r"spare [\d.,]+ [KMG]?i?B|[\d.,]+ [KMG]?i?B, spare [\d.,]+ [KMG]?i?B", "#"),
    (r"^(cpu: |.* on )[A-Z].*$", r"\1DEVICE"),
    (r"[\d,]*\d(?:\.\d+)?(?:e[+-]?\d+)?", "#"),
    (r"# (?:[KMG]iB|B|bytes)\b", "#"),  # none has no unit
    (r"# (?:µs|ms|s)\b", "#"),  # the unit goes by the size
    (r"-(?=#)", ""),
)


def masked(text: str) -> list[str]:
    """Return the lines of a text with one space between words, and without numbers, devices and configurations."""
    lines = []
    for line in text.strip().splitlines():
        for pattern, mask in _MASKS:
            line = re.sub(pattern, mask, line)
        lines.append(" ".join(line.split()))
    return lines


def assert_prints(printed: str, shown: str, may_add: str = "(?!)") -> None:
    """Assert that a text has the words and columns that a document shows; '...' stands for any lines.

    Args:
        printed: what was printed.
        shown: what the document shows.
        may_add: pattern of lines that depend on the machine's load, and may be printed besides.
    """
    found = [line for line in masked(printed) if not re.match(may_add, line)]
    at = 0
    skips = False
    for line in masked(shown):
        if line == "...":
            skips = True
            continue
        if skips:
            assert line in found[at:], f"{line!r} is not printed after line {at}: {found}"
            at += found[at:].index(line)
            skips = False
        assert found[at : at + 1] == [line], f"line {at + 1} of {found}"
        at += 1
    assert skips or at == len(found), f"the document does not show {found[at:]}"
