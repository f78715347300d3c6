"""Configurations: stated ones, random micro-configurations and desirable sets."""

from hypothesis import strategies as st

from ucudnn.configuration import Configuration, MicroConfiguration
from ucudnn.solvers.desirable import desirable_set


def in_parts(algorithm, size=8, batch=8):
    """Return a division of a mini-batch into equal parts by an algorithm without workspace."""
    part = MicroConfiguration(size=size, algorithm=algorithm, time_ms=1.0, workspace_bytes=0)
    return Configuration(parts=(part,) * (batch // size))


@st.composite
def micro_configurations(draw, largest=8, most=10):
    """Draw micro-configurations with whole microseconds, whose sums floats hold exactly enough to compare."""
    return [
        MicroConfiguration(size=size, algorithm=f"a{index}", time_ms=time / 1000, workspace_bytes=workspace)
        for index, (size, time, workspace) in enumerate(
            draw(
                st.lists(
                    st.tuples(st.integers(1, largest), st.integers(1, 200), st.integers(0, 30)),
                    min_size=1,
                    max_size=most,
                )
            )
        )
    ]


@st.composite
def points(draw):
    """Draw a front of up to five configurations, rather than the few that random ones leave."""
    count = draw(st.integers(1, 5))
    sizes, times = (
        sorted(draw(st.lists(st.integers(least, 40), min_size=count, max_size=count, unique=True))) for least in (0, 1)
    )
    return tuple(
        Configuration(
            parts=(MicroConfiguration(size=1, algorithm=f"a{size}", time_ms=time / 1000, workspace_bytes=size),)
        )
        for size, time in zip(sizes, reversed(times), strict=True)
    )


fronts = points() | st.builds(desirable_set, micro_configurations(largest=3, most=6), st.integers(1, 4)).filter(bool)
