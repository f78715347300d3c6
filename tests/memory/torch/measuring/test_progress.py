"""Tests of what a long call says: each stage, and now and then how far it is."""

from ucudnn.memory.torch.measuring.progress import Stages


def test_each_stage_is_told_and_how_far_it_is_every_five_seconds():
    told, seconds = [], iter([0.0, 1.0, 4.9, 5.0, 5.0, 9.9, 10.0, 10.0, 10.1])
    stages = Stages(told.append, clock=lambda: next(seconds))
    stages.begin("measuring")
    for count in range(5):
        stages.done(count, 8)
    assert told == ["measuring", "measuring: 2 of 8", "measuring: 4 of 8"]
    stages.begin("planning")
    assert told[-1] == "planning"
