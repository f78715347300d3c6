"""Pictures are drawn in the package's style."""

import pytest
from matplotlib import rc_context

from ucudnn.plots.style import STYLE


@pytest.fixture(autouse=True)
def style():
    with rc_context(STYLE):
        yield
