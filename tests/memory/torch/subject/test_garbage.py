"""While a step is fitted, the garbage collector passes over older objects, and still collects new ones."""

import gc
import weakref

import pytest
import torch

import ucudnn.memory
from ucudnn.memory.torch.subject.left_as_found import Snapshot, only_new_collected


@pytest.fixture(autouse=True)
def frozen(older_objects_released):
    """Take the place of what freezes objects before each other test."""


class _Circle:
    """Holds itself."""

    def __init__(self):
        self.itself = self


def assert_frozen(count):
    """Assert that the same objects are frozen, of which other threads of this process may have dropped a few."""
    assert count - 500 < gc.get_freeze_count() <= count


def test_garbage_goes_before_and_inside_and_nothing_stays_frozen_after_an_error_either():
    before = weakref.ref(_Circle())
    with only_new_collected(Snapshot()):
        assert before() is None
        frozen = gc.get_freeze_count()
        assert frozen > 10_000
        inside = weakref.ref(_Circle())
        gc.collect()
        assert inside() is None
        made = [_Circle() for _ in range(1000)]
        with only_new_collected(Snapshot()):
            assert_frozen(frozen)
        assert_frozen(frozen)
    assert len(made) == 1000
    assert gc.get_freeze_count() == 0
    with pytest.raises(ValueError, match="of the caller"), only_new_collected(Snapshot()):
        raise ValueError("of the caller")
    assert gc.get_freeze_count() == 0


def test_a_snapshot_releases_what_an_error_at_the_end_of_the_block_leaves_frozen():
    snapshot = Snapshot()
    block = only_new_collected(snapshot)
    block.__enter__()
    assert gc.get_freeze_count()
    snapshot.restore()
    assert gc.get_freeze_count()
    snapshot.restore_all()
    assert gc.get_freeze_count() == 0
    block.__exit__(None, None, None)


def test_what_a_program_has_frozen_itself_stays_so():
    gc.freeze()
    try:
        frozen, made = gc.get_freeze_count(), [_Circle() for _ in range(1000)]
        with only_new_collected(Snapshot()):
            assert_frozen(frozen)
        assert_frozen(frozen)
        assert len(made) == 1000
    finally:
        gc.unfreeze()


class _Notes:
    """Something that a step may change, because its contents are not compared."""

    __slots__ = ("frozen",)

    def __init__(self):
        self.frozen = []


class _Watched(torch.nn.Linear):
    """Notes how many objects are frozen when it is called."""

    def __init__(self):
        super().__init__(3, 2)
        self.notes = _Notes()

    def forward(self, x):
        """Return the outputs."""
        self.notes.frozen.append(gc.get_freeze_count())
        return super().forward(x)


def test_a_step_is_fitted_without_a_look_at_older_objects():
    model = _Watched()
    step = ucudnn.memory.fit(
        model, (torch.randn(4, 3), torch.tensor([0, 1, 0, 1])), loss=torch.nn.functional.cross_entropy
    )
    assert min(model.notes.frozen) > 10_000
    assert gc.get_freeze_count() == 0
    step.close()
