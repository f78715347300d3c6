"""Which sizes and algorithms the rounds of a schedule have."""

from math import ceil
from random import Random
from statistics import fmean
from types import MappingProxyType, SimpleNamespace

import pytest

from tests.support.problems import make_problem
from ucudnn.benchmarking.exploration import explorer as schedule_module
from ucudnn.benchmarking.exploration.explorer import Schedule
from ucudnn.benchmarking.request import Request
from ucudnn.configuration import MicroConfiguration
from ucudnn.policy import BatchSizePolicy
from ucudnn.solvers.desirable import fastest

LADDER = (1, 2, 4, 8, 16, 32, 64)


def micro(size, name, rate, workspace):
    return (size, name), MicroConfiguration(
        size=size, algorithm=name, time_ms=rate * size, workspace_bytes=workspace * size
    )


def schedule(names, sizes=LADDER, *, micros, tried=LADDER, fits=lambda size, name: True, compiled=()):
    """Return the rounds of the policy `adaptive` for a mini-batch of the largest size."""
    wanted = Request(problem=make_problem(batch=sizes[-1]), sizes=sizes, limit_bytes=0, adaptive=True, whole=False)
    found = {"micros": MappingProxyType(micros), "tried": tried, "fits": fits, "compiled": compiled}
    return iter(Schedule(SimpleNamespace(request=wanted, names=names, **found)))


@pytest.mark.parametrize("limit", [2900, 6400])
def test_an_algorithm_that_does_not_fit_at_twice_a_size_gets_the_benefit_of_the_doubt(limit):
    # CLOSE is the fastest at each size, but needs 100 bytes for each sample. Twelve others fit at any size.
    rates = {1: 10.0, 2: 6.0, 4: 4.0, 8: 3.0, 16: 2.0, 32: 1.2, 64: 1.2}
    others = [f"OTHER{index}" for index in range(12)]
    slower = {name: 1.1 + index / 50 for index, name in enumerate(others)}
    micros = dict(micro(size, name, rates[size] * slower[name], 1) for size in LADDER for name in others)
    micros |= dict(micro(size, "CLOSE", rates[size], 100) for size in LADDER if size * 100 <= limit)
    rounds = schedule(
        ["CLOSE", *others], micros=micros, fits=lambda size, name: size * (100 if name == "CLOSE" else 1) <= limit
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
def test_an_algorithm_that_must_be_compiled_at_each_size_must_be_more_promising(rate, compiles):
    micros = dict(micro(size, "FAST", 1.0, 1) for size in LADDER)
    micros |= dict(micro(size, "OTHER", rate, 1) for size in LADDER)
    rounds = schedule(["FAST", "OTHER"], micros=micros, compiled={"OTHER"} if compiles else ())
    assert next(rounds)[1] == ["FAST", "OTHER"], "it is measured at powers of two in any case"
    chosen = set(next(rounds)[1])
    assert chosen - {"OTHER"} == {"FAST"}
    assert ("OTHER" in chosen) == (rate < (1.05 if compiles else 1.6))


class Staircases:
    """Algorithms whose time grows in steps, because a wave takes the same time however many samples it has."""

    def __init__(self, waves, limit_bytes=256, batch=256, compiled=()):
        self.compiled = compiled
        self.waves = waves  # samples of a wave, milliseconds of a wave, bytes of workspace for each sample
        self.limit_bytes = limit_bytes
        self.batch = batch
        self.micros = {}
        self.single = []

    def fits(self, size, name):
        return size * self.waves[name][2] <= self.limit_bytes

    def measure(self, size, name):
        samples, wave_ms, bytes_each = self.waves[name]
        if self.fits(size, name):
            self.micros[size, name] = MicroConfiguration(
                size=size,
                algorithm=name,
                time_ms=wave_ms * ceil(size / samples),
                workspace_bytes=int(size * bytes_each),
            )

    def explore(self):
        """Return the time of the configuration that `adaptive` finds."""
        tried = set()
        sizes = BatchSizePolicy.ADAPTIVE.sizes(self.batch)
        rounds = schedule(
            list(self.waves), sizes, micros=self.micros, tried=tried, fits=self.fits, compiled=self.compiled
        )
        for asked, names, _ in rounds:
            pairs = [(size, name) for size in asked for name in names]
            tried.update(asked)
            if len(pairs) == 1:
                self.single += pairs
            for pair in pairs:
                self.measure(*pair)
        return fastest(self.micros.values(), self.batch).time_ms

    def best(self):
        """Return the time of the best configuration of all sizes."""
        for size in range(1, self.batch + 1):
            for name in self.waves:
                self.measure(size, name)
        return fastest(self.micros.values(), self.batch).time_ms


@pytest.mark.parametrize("edge", [97, 99, 109, 117])
def test_the_largest_size_before_a_step_is_found(edge):
    # At powers of two and at the largest size that fits, EDGE is no better than others, as a wave is not full there.
    staircases = Staircases({"EDGE": (edge, 1.0, 256 / 119), "FLAT": (1, 0.0115, 2), "OTHER": (64, 0.75, 2)})
    staircases.explore()
    assert (edge, "EDGE") in staircases.micros
    assert len(staircases.single) <= 12


def test_steps_of_compiled_algorithms_are_not_looked_for():
    waves = {"EDGE": (99, 1.0, 256 / 119), "FLAT": (1, 0.0115, 2)}
    assert "EDGE" in {name for _, name in explored(waves).single}
    assert "EDGE" not in {name for _, name in explored(waves, compiled={"EDGE"}).single}


def explored(waves, **options):
    staircases = Staircases(waves, **options)
    staircases.explore()
    return staircases


def test_steps_are_looked_for_only_if_they_may_gain_something():
    staircases = Staircases({"FLAT": (1, 0.01, 2), "SLOW": (100, 3.0, 2)})
    staircases.explore()
    assert not [name for _, name in staircases.single if name == "SLOW"]


def test_adaptive_comes_near_to_all_sizes_if_time_grows_in_steps(monkeypatch):
    chance = Random()
    seeds = [chance.getrandbits(32) for _ in range(60)]
    behind = {schedule_module._MOST_STEPS: [], 0: []}
    for seed in seeds:
        each = Random(seed)
        waves = {}
        for name in "ABCDEFGH":
            samples = each.uniform(8, 60)
            waves[name] = samples, samples * each.uniform(0.8, 1.3), each.choice([1.5, 2, 2.5, 3])
        best_ms = Staircases(waves).best()
        for most, ratios in behind.items():
            monkeypatch.setattr(schedule_module, "_MOST_STEPS", most)
            ratios.append(Staircases(waves).explore() / best_ms - 1)
    with_steps, without = map(fmean, behind.values())
    assert with_steps < 0.012, seeds
    assert with_steps < 0.95 * without, seeds
