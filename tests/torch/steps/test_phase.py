"""The phases of tuning and their transitions, and the page that draws them."""

from tests.support.paths import ROOT
from ucudnn.torch.steps.phase import Transition, TuningPhase, next_phase


def transitions(phase):
    """Return the phases that may follow one, by transition."""
    found = {}
    for each in Transition:
        try:
            found[each] = next_phase(phase, each)
        except KeyError:
            continue
    return found


def test_each_phase_leads_on_until_all_is_settled_and_other_steps_begin_anew():
    reached, left = set(), [TuningPhase.WARMING]
    while left:
        phase = left.pop()
        reached.add(phase)
        following = transitions(phase)
        assert following.pop(Transition.OTHER_STEPS) is TuningPhase.WARMING
        assert bool(following) is (phase is not TuningPhase.SETTLED)
        left += [each for each in following.values() if each not in reached]
    assert reached == {*TuningPhase}


def test_the_architecture_page_draws_all_of_them():
    page = (ROOT / "docs" / "architecture.md").read_text()
    for each in (*TuningPhase, *Transition):
        assert each.name.lower().replace("_", " ") in page
