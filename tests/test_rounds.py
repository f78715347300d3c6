"""Which algorithms a round has."""

import pytest

from ucudnn.configuration import MicroConfiguration
from ucudnn.rounds import Rounds

LADDER = (1, 2, 4, 8, 16, 32, 64)


def micro(size, name, rate, workspace):
    return (size, name), MicroConfiguration(
        size=size, algorithm=name, time_ms=rate * size, workspace_bytes=workspace * size
    )


@pytest.mark.parametrize("limit", [2900, 6400])
def test_what_does_not_fit_at_twice_a_size_gets_the_benefit_of_the_doubt(limit):
    # CLOSE is the best at each size, but takes 100 bytes for each sample; twelve others fit at any size.
    rates = {1: 10.0, 2: 6.0, 4: 4.0, 8: 3.0, 16: 2.0, 32: 1.2, 64: 1.2}
    others = [f"OTHER{index}" for index in range(12)]
    slower = {name: 1.1 + index / 50 for index, name in enumerate(others)}
    micros = dict(micro(size, name, rates[size] * slower[name], 1) for size in LADDER for name in others)
    micros |= dict(micro(size, "CLOSE", rates[size], 100) for size in LADDER if size * 100 <= limit)
    rounds = iter(
        Rounds(
            64,
            LADDER,
            ["CLOSE", *others],
            adaptive=True,
            whole=False,
            micros=micros,
            tried=set(LADDER),
            fits=lambda size, name: size * (100 if name == "CLOSE" else 1) <= limit,
            compiled=(),
        )
    )
    sizes, names, _ = next(rounds)
    assert tuple(sizes) == LADDER
    assert names == ["CLOSE", *others]
    sizes, names, _ = next(rounds)
    assert "CLOSE" in names
    if limit == 2900:
        assert 29 in sizes or 28 in sizes, "near the largest size at which it fits"


@pytest.mark.parametrize("rate", [1.0, 1.04, 1.3, 2.0])
@pytest.mark.parametrize("compiles", [False, True])
def test_what_takes_a_compiler_at_each_size_must_promise_more(rate, compiles):
    micros = dict(micro(size, "FAST", 1.0, 1) for size in LADDER)
    micros |= dict(micro(size, "OTHER", rate, 1) for size in LADDER)
    rounds = iter(
        Rounds(
            64,
            LADDER,
            ["FAST", "OTHER"],
            adaptive=True,
            whole=False,
            micros=micros,
            tried=set(LADDER),
            fits=lambda size, name: True,
            compiled={"OTHER"} if compiles else (),
        )
    )
    assert next(rounds)[1] == ["FAST", "OTHER"], "it is measured at powers of two in any case"
    chosen = set(next(rounds)[1])
    assert chosen - {"OTHER"} == {"FAST"}
    assert ("OTHER" in chosen) == (rate < (1.05 if compiles else 1.6))
