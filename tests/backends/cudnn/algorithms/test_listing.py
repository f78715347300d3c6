"""What is listed for problems that add a bias: engines that add it, and all other algorithms, with a kernel behind."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support.described_graphs import DescribingLibrary
from tests.support.problems import make_problem
from ucudnn.arrays import BiasedFilters
from ucudnn.backends.base import Offset, PreparedCall, Scaling
from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cudnn.algorithms import listing
from ucudnn.backends.cudnn.algorithms.graph_call import GraphCall
from ucudnn.backends.cudnn.algorithms.legacy_call import ADDED, AddedBiasCall
from ucudnn.backends.cudnn.algorithms.prepare import Preparer
from ucudnn.backends.cudnn.api.enums import HeuristicMode
from ucudnn.backends.cudnn.gpu.base import DeviceBuffer
from ucudnn.errors import BackendError, UnsupportedProblemError
from ucudnn.profiles.measurement import Algorithm

PLAIN = make_problem(groups=1)
BIASED = replace(PLAIN, biased=True)


class HostLibrary(DescribingLibrary):
    """Has descriptors of tensors, and notes additions."""

    def __init__(self):
        super().__init__()
        self.added = []

    def call(self, name, *arguments):
        if name.startswith(("cudnnCreateTensor", "cudnnSetTensor")):
            return next(self._addresses)
        return super().call(name, *arguments)

    def cudnnAddTensor(self, handle, alpha, bias_descriptor, bias, beta, descriptor, y):  # noqa: N802
        self.added.append((bias, y))
        return self.status

    def cudnnDestroyTensorDescriptor(self, address):  # noqa: N802
        return 0

    status = 0


@pytest.fixture
def opened(monkeypatch):
    """Return a list of algorithms with engine 7 for each problem, and a legacy algorithm for those without a bias."""

    def engines(library, handle, problem):
        compiles = problem.biased  # as cuDNN's engines for more than one operation
        return [Algorithm(name="eng7", workspace_bytes=256 + problem.biased, api="graph", compiles=compiles)]

    def legacy(library, handle, problem):
        assert not problem.biased
        return [Algorithm(name="FFT", workspace_bytes=512, api="legacy")]

    monkeypatch.setattr(listing, "graph_algorithms", engines)
    monkeypatch.setattr(listing, "legacy_algorithms", legacy)
    library, compiler = HostLibrary(), SimpleNamespace(listed=lambda *_: None)
    device = SimpleNamespace(copier=None)
    preparer = Preparer(library, 5, device, compiler)
    return lambda candidates: listing.AlgorithmList(candidates, preparer), preparer


@pytest.mark.parametrize(
    ("candidates", "names"),
    [
        (Candidates.EVERY, ["eng7", "eng7+added", "FFT+added"]),
        (Candidates.GRAPH, ["eng7", "eng7+added"]),
        (Candidates.LEGACY, ["FFT+added"]),
    ],
)
def test_engines_that_add_a_bias_come_first(opened, candidates, names):
    algorithms = opened[0](candidates)
    assert [each.name for each in algorithms.of(BIASED)] == names
    assert not any(each.name.endswith(ADDED) for each in algorithms.of(PLAIN))
    plain = {each.name: each for each in algorithms.of(PLAIN)}
    for each in algorithms.of(BIASED):
        if each.name.endswith(ADDED):
            assert replace(each, name=each.name.removesuffix(ADDED)) == plain[each.name.removesuffix(ADDED)]


def test_algorithms_are_found_by_name(opened):
    algorithms = opened[0](Candidates.EVERY)
    assert algorithms.named(BIASED, "FFT+added").workspace_bytes == 512
    assert algorithms.named(BIASED, "eng7").workspace_bytes == 512  # as the stand-in for cuDNN says
    assert algorithms.named(BIASED, "eng7+added").name == "eng7+added"
    assert algorithms.named(BIASED, "eng8") is None
    assert algorithms.named(BIASED, "FFT") is None
    assert algorithms.named(PLAIN, "FFT+added") is None


def test_names_are_prepared_as_what_they_say(opened):
    preparer = opened[1]
    fused = preparer.prepare(BIASED, "eng7", ())
    assert isinstance(fused, GraphCall)
    assert isinstance(preparer.prepare(BIASED, "eng7+added", ()), AddedBiasCall)
    for problem, name in ((BIASED, "FFT"), (PLAIN, "eng7+added")):
        with pytest.raises(UnsupportedProblemError):
            preparer.prepare(problem, name, ())


class Noted(PreparedCall):
    """A call that notes its launches."""

    def __init__(self):
        self.launched = []

    def launch(self, *arguments):
        self.launched.append(arguments)


def test_the_bias_is_added_to_the_part_that_was_computed():
    library, inner = HostLibrary(), Noted()
    call = AddedBiasCall(library, 5, BIASED.part(2), inner, 256)
    workspace, offset, scaling = DeviceBuffer(1 << 20, 256), Offset(4), Scaling(0.5, 2.0)
    call.launch(4096, BiasedFilters(6144, 7168), 8192, workspace, offset, scaling)
    assert inner.launched == [(4096, 6144, 8192, workspace, offset, scaling)]
    assert library.added == [(7168, 8192 + 4 * BIASED.steps[1])]
    library.status = 5000
    with pytest.raises(BackendError, match="cudnnAddTensor"):
        call.launch(4096, BiasedFilters(6144, 7168), 8192, workspace)


def test_the_list_leads_with_what_mode_a_offers_first(opened):
    algorithms = opened[0](Candidates.EVERY)
    opened[1].library.offers = {HeuristicMode.A: (5, 3, 8)}
    assert [each.name for each in algorithms.leading(PLAIN, 2)] == ["eng7_k2=5", "eng7_k2=3"]
    assert not algorithms.leading(BIASED, 2), "its list begins with engines that add the bias"
    assert not opened[0](Candidates.LEGACY).leading(PLAIN, 2)
    algorithms.of(PLAIN)
    assert [each.name for each in algorithms.leading(PLAIN, 2)] == ["eng7", "FFT"], "its list is made"
    assert [each.name for each in algorithms.leading(BIASED, 2)] == []
