"""Tests of what is asked of PyTorch's allocator, with a stand-in for its functions: a CPU has no such allocator."""

from types import SimpleNamespace

import pytest
import torch

from ucudnn.memory.torch.device import allocator
from ucudnn.memory.torch.device.allocator import allocator_cap, expand_segments, take_in_one_piece

GPU = torch.device("cuda", 0)
TOTAL = 1000


class Cuda:
    """PyTorch's functions of a GPU's allocator."""

    def __init__(self, *, backend="native", settings="", obeys=True, error=None):
        self.backend, self.settings, self.obeys, self.error = backend, settings, obeys, error
        self.fraction, self.reserved, self.emptied = 0.75, 100, 0
        self.memory = SimpleNamespace(_snapshot=self.snapshot)

    def get_allocator_backend(self):
        return self.backend

    def snapshot(self):
        grows = self.obeys and "segments:True" in self.settings
        return {"allocator_settings": {"expandable_segments": grows, "PYTORCH_CUDA_ALLOC_CONF": self.settings}}

    def empty_cache(self):
        self.emptied += 1

    def memory_reserved(self, device):
        return self.reserved

    def get_device_properties(self, device):
        return SimpleNamespace(total_memory=TOTAL)

    def get_per_process_memory_fraction(self, device):
        return self.fraction

    def set_per_process_memory_fraction(self, fraction, device):
        self.fraction = fraction

    def get(self):
        return self.settings

    def set(self, settings):
        if self.error:
            raise RuntimeError(self.error)
        self.settings = settings


@pytest.fixture
def pytorch(monkeypatch):
    """Return a function that puts a stand-in in the place of PyTorch."""

    def put(private=True, **options):
        cuda = Cuda(**options)
        functions = {"_accelerator_getAllocatorSettings": cuda.get, "_accelerator_setAllocatorSettings": cuda.set}
        cuda.taken = []

        def empty(size, **how):
            assert cuda.emptied
            cuda.taken.append((size, how))
            if cuda.error:
                raise torch.OutOfMemoryError(cuda.error)

        private_functions = SimpleNamespace(**functions if private else {})
        stand_in = SimpleNamespace(cuda=cuda, _C=private_functions, device=torch.device, empty=empty, uint8=torch.uint8)
        stand_in.OutOfMemoryError = torch.OutOfMemoryError
        cuda.memory._set_allocator_settings = cuda.set
        monkeypatch.setattr(allocator, "torch", stand_in)
        return cuda

    return put


@pytest.mark.parametrize("private", [True, False])
def test_segments_grow_where_nobody_said_anything(pytorch, private):
    cuda = pytorch(private)
    assert expand_segments(GPU) == ""
    assert cuda.settings == "expandable_segments:True"
    assert cuda.emptied == 1


@pytest.mark.parametrize("private", [True, False])
def test_other_settings_stay(pytorch, private):
    cuda = pytorch(private, settings="garbage_collection_threshold:0.8")
    assert expand_segments(GPU) == ""
    assert cuda.settings == "garbage_collection_threshold:0.8,expandable_segments:True"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"settings": "expandable_segments:False"}, "the environment says expandable_segments:False"),
        ({"settings": "max_split_size_mb:200"}, "does not go with"),
        ({"backend": "cudaMallocAsync"}, "allocator is cudaMallocAsync"),
        ({"error": "not on this platform\nframes"}, "refuses expandable_segments:True: not on this platform"),
        ({"obeys": False}, "ignores expandable_segments:True"),
    ],
)
def test_where_segments_cannot_grow_the_reason_is_named(pytorch, options, reason):
    cuda = pytorch(**options)
    before = cuda.settings
    why = expand_segments(GPU)
    assert reason in why
    assert "\n" not in why
    assert cuda.settings == before or not cuda.obeys


def test_segments_that_grow_already_are_left_alone(pytorch):
    cuda = pytorch(settings="expandable_segments:True")
    assert expand_segments(GPU) == ""
    assert not cuda.emptied


def test_a_cpu_is_left_alone(pytorch):
    cuda = pytorch()
    assert expand_segments(torch.device("cpu")) == ""
    with allocator_cap(torch.device("cpu")) as allow:
        allow(1)
    assert (cuda.settings, cuda.fraction) == ("", 0.75)


def test_a_cap_counts_from_what_is_there_and_goes_after_an_error(pytorch):
    cuda = pytorch()
    found = []

    def fail(allow):
        for size in (50, -1, 10**6, None, 10):
            allow(size)
            found.append(cuda.fraction)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"), allocator_cap(GPU) as allow:
        fail(allow)
    assert found == [0.15, 0.1, 0.75, 0.75, 0.11]  # never more than the program's own bound
    assert cuda.fraction == 0.75


def test_without_a_way_back_nothing_is_bounded(pytorch):
    cuda = pytorch()
    del Cuda.get_per_process_memory_fraction
    try:
        with allocator_cap(GPU) as allow:
            allow(10)
    finally:
        Cuda.get_per_process_memory_fraction = lambda self, device: self.fraction
    assert cuda.fraction == 0.75


@pytest.mark.parametrize(("most", "taken"), [(1000, 980), (903, 900), (902, 880), (22, 0)])
@pytest.mark.parametrize("error", [None, "others have it"])
def test_what_the_allocator_may_have_is_taken_in_whole_pages_as_one_piece(pytorch, most, taken, error):
    mib = 2**20
    cuda = pytorch(error=error)
    cuda.reserved = 3 * mib
    take_in_one_piece(GPU, most * mib)
    assert cuda.taken == ([(taken * mib, {"dtype": torch.uint8, "device": GPU})] if taken else [])
    cuda.reserved = most * mib
    take_in_one_piece(GPU, most * mib)
    assert len(cuda.taken) == (taken > 0)
