"""The script that times engines which add a bias, on the stand-in for cuDNN."""

import pytest

torch = pytest.importorskip("torch")

from bench.torch.bias import CASES, measure, problem_of  # noqa: E402
from tests.support.problems import make_problem  # noqa: E402
from ucudnn.backends.candidates import Candidates  # noqa: E402
from ucudnn.backends.cudnn.backend import CudnnBackend  # noqa: E402
from ucudnn.torch.device.gpu import TorchGpu  # noqa: E402


def test_each_kind_of_engine_is_timed_within_each_limit(host, capsys):
    gpu = TorchGpu(0)
    backend = CudnnBackend(library_path=host.stub._name, device=gpu, candidates=Candidates.GRAPH_PLAIN)
    problem = make_problem(groups=1, biased=True)
    case = measure("small", problem, backend, gpu, torch.device("cpu"))
    for limit in ("no limit", "64 MiB"):
        added, fused = case[limit]["added"], case[limit]["fused"]
        assert added["algorithm"] == fused["algorithm"] == "eng1"
        assert 0 < fused["with_bias"] < added["with_bias"] == pytest.approx(added["alone"])
        assert "alone" not in fused
    assert capsys.readouterr().out.startswith("small ")


def test_all_cases_add_a_bias():
    assert all(problem_of(name).biased for name in CASES)
    assert sum(name.endswith("without TF32") for name in CASES) == 1
