"""Random workspace divisions as fronts and counts, and their optima by other means."""

from hypothesis import strategies as st

TICKS_PER_MS = 10**9
FEW_OR_MANY = st.integers(1, 3) | st.integers(1, 30)


@st.composite
def fronts(draw, most=5, widest=60):
    """Draw a front: bytes that rise, and whole microseconds that fall; often with points that a solver can mix up.

    Some fronts lie on one line, so that all their points are worth the same, and some have one point.
    """
    sizes = tuple(sorted(draw(st.sets(st.integers(0, widest), min_size=1, max_size=most))))
    if draw(st.booleans()):
        slope = draw(st.integers(1, 3))
        ticks = [slope * (widest - size) + 1 for size in sizes]
    else:
        times = st.sets(st.integers(1, 200), min_size=len(sizes), max_size=len(sizes))
        ticks = sorted(draw(times), reverse=True)
    return sizes, tuple(tick / 1000 for tick in ticks)


@st.composite
def divisions(draw, most=4, counts=FEW_OR_MANY):
    """Draw fronts, counts and a total that is enough for all first points, and not enough for all last ones."""
    count_of = {}
    for front in draw(st.lists(fronts(), min_size=1, max_size=most, unique=True)):
        count_of[front] = draw(counts)
    least, all_fastest = (sum(sizes[end] * count for (sizes, _), count in count_of.items()) for end in (0, -1))
    if least == all_fastest:
        count_of[(0, 7), (0.3, 0.1)] = draw(counts)
        all_fastest = least + 7 * count_of[(0, 7), (0.3, 0.1)]
    total = draw(st.integers(least, all_fastest - 1))
    return list(count_of), list(count_of.values()), total


def ticks_of(time_ms):
    return round(time_ms * TICKS_PER_MS)


def optimum(given_fronts, counts, total):
    """Return ticks and bytes of the fastest division with the fewest bytes, kernel by kernel over all bytes."""
    best = {0: 0}
    for (sizes, times), count in zip(given_fronts, counts, strict=True):
        points = [(size, ticks_of(time)) for size, time in zip(sizes, times, strict=True)]
        for _ in range(count):
            reached = {}
            for held, ticks in best.items():
                for size, time in points:
                    if held + size <= total and ticks + time < reached.get(held + size, ticks + time + 1):
                        reached[held + size] = ticks + time
            best = reached
    return min((ticks, held) for held, ticks in best.items())


def totals_of(given_fronts, counts, found):
    """Return ticks and bytes of a division, after a check that each kernel takes one point."""
    assert [sum(row.values()) for row in found] == list(counts)
    assert all(kernels > 0 for row in found for kernels in row.values())
    taken = [
        (ticks_of(times[index]) * kernels, sizes[index] * kernels)
        for (sizes, times), row in zip(given_fronts, found, strict=True)
        for index, kernels in row.items()
    ]
    return sum(ticks for ticks, _ in taken), sum(size for _, size in taken)
