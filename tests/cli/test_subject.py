"""All commands take the same mini-batch where none is typed."""

from dataclasses import replace

import pytest

from ucudnn.backends import open_backend
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.cli import network as network_commands
from ucudnn.cli.subject import Subject, network_on
from ucudnn.errors import BackendError
from ucudnn.networks.tables import CSV_HEADER, load_network
from ucudnn.networks.variants import variants
from ucudnn.policy import BatchSizePolicy
from ucudnn.problem import DataType


class StoppedError(BackendError):
    """Raised once a command knows its network, so that nothing is measured."""


@pytest.mark.parametrize(("given", "expected"), [([], 16), (["--batch", "3"], 3)])
@pytest.mark.parametrize("command", ["plan", "time", "profile"])
def test_commands_share_the_default_mini_batch_on_a_cpu(call, monkeypatch, tmp_path, command, given, expected):
    seen = []

    def stop(network, *_, **__):
        seen.append({layer.forward.batch for layer in network.layers})
        raise StoppedError("stopped")

    monkeypatch.setattr(network_commands, "record_requests", stop)
    monkeypatch.setattr(Subject, "groups", lambda self, _: stop(self.network))
    out = ["--out", str(tmp_path / "a.json")] if command == "profile" else []
    assert "stopped" in call(command, "alexnet", "--backend", "cpu", *given, *out)[2]
    assert seen == [{expected}]


def test_other_networks_and_backends_have_their_own(tmp_path):
    path = tmp_path / "layers.csv"
    path.write_text(f"{CSV_HEADER}\nonly,6,6,2,4,3,3,3,1,1,1,1\n")
    cpu, replay = open_backend("cpu"), open_backend("replay:h200")
    assert network_on(cpu, str(path), None).layers[0].forward.batch == 4
    assert network_on(replay, "alexnet", None).layers[0].forward.batch == 256


def test_a_recording_of_another_mini_batch_is_planned_at_that(monkeypatch):
    replay = open_backend("replay:h200")
    asked = []

    def recorded(problem):
        asked.append((problem.batch, problem.dtype))
        return {DataType.FLOAT32: frozenset({1, 2, 4, 8, 16}), DataType.FLOAT16: frozenset({256})}[problem.dtype]

    monkeypatch.setattr(replay, "sizes", recorded)
    assert network_on(replay, "alexnet", None).batch == 16
    assert network_on(replay, "alexnet", 4).batch == 4
    (half,) = variants(["float16"], ["tf32"], ["first"])
    assert network_on(replay, "alexnet", None, half).batch == 256
    assert asked == [(256, DataType.FLOAT32), (256, DataType.FLOAT16)]


def test_adaptive_says_where_a_profile_has_powers_of_two_only(monkeypatch):
    replay = open_backend("replay:h200")
    subject = Subject(
        network=load_network("alexnet"), variant=variants(["float32"], ["tf32"], ["first"])[0], backend=replay
    )
    said = "replay:h200 has powers of two only, so policy adaptive tries no other micro-batch sizes"
    assert subject.lacks_sizes(BatchSizePolicy.ADAPTIVE) == said
    for policy in set(BatchSizePolicy) - {BatchSizePolicy.ADAPTIVE}:
        assert subject.lacks_sizes(policy) is None
    last = subject.network.kernels()[-1].problem
    real = replay.sizes
    monkeypatch.setattr(replay, "sizes", lambda problem: real(problem) | ({3} if problem == last else set()))
    assert subject.lacks_sizes(BatchSizePolicy.ADAPTIVE) is None, "one kernel has another size"
    assert replace(subject, backend=open_backend("cpu")).lacks_sizes(BatchSizePolicy.ADAPTIVE) is None


def test_plan_prints_that_before_its_table(call):
    arguments = ("plan", "alexnet", "--profile", "h200", "--policy", "adaptive", "--csv")
    status, table, notes = call(*arguments)
    assert status == 0
    assert "tries no other micro-batch sizes" in notes
    assert "tries no other" not in table


@pytest.mark.parametrize(
    ("seconds", "told"), [(19.9, ""), (95, "95 seconds"), (150, "2 minutes"), (7200, "2 hours"), (86400, "24 hours")]
)
def test_how_long_measuring_takes_is_said_before_it_begins_and_only_of_what_is_not_known(
    call, monkeypatch, tmp_path, seconds, told
):
    path = tmp_path / "layers.csv"
    path.write_text(f"{CSV_HEADER}\nonly,6,6,2,4,3,3,3,1,1,1,1\n")
    asked = []
    monkeypatch.setattr(CpuBackend, "expected_seconds", lambda self, problems: asked.append(len(problems)) or seconds)
    words = ["plan", str(path), "--backend", "cpu", "--database", str(tmp_path / "kept.sqlite")]
    for _ in range(2):
        status, _, error = call(*words)
        assert status == 0
        assert error.splitlines() == ([f"measuring 3 convolutions on this machine takes about {told}"] if told else [])
        told = ""
    assert asked == [3]
