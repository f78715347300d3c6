"""Bundles against every way to choose for each kernel."""

from itertools import product
from math import fsum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import paper
from tests.support.configurations import fronts
from ucudnn.solvers.desirable import bundled

segments = st.lists(fronts, min_size=1, max_size=4)


def microseconds(time_ms):
    return round(time_ms * 1000)


@given(segments)
def test_bundles_are_the_desirable_set_of_all_choices_and_what_they_say(given_fronts):
    everything = {
        (sum(microseconds(each.time_ms) for each in taken), max(each.workspace_bytes for each in taken))
        for taken in product(*given_fronts)
    }
    bundles = bundled(given_fronts)
    found = [(microseconds(bundle.time_ms), bundle.workspace_bytes) for bundle in bundles]
    assert found == sorted(paper.desirable(everything), reverse=True), "in order of workspace"
    for bundle in bundles:
        assert all(part in front for part, front in zip(bundle.parts, given_fronts, strict=True))
        assert bundle.workspace_bytes == max(part.workspace_bytes for part in bundle.parts)
        assert bundle.time_ms == pytest.approx(fsum(part.time_ms for part in bundle.parts))
