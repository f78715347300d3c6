"""Random workspace divisions as fronts and counts, and their optima by other means."""

from itertools import accumulate

from hypothesis import strategies as st

from ucudnn.errors import SolverUnavailableError
from ucudnn.settings import SolverName
from ucudnn.solvers import integer_program

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


@st.composite
def scaled_divisions(draw):
    """Draw a division whose bytes reach from a few to petabytes, and whose times from a nanosecond to ten seconds.

    Often all kernels are of one scale, and the total is that of a selection, or one byte less. The first front has
    times of 0, and points that are equally fast.
    """
    bytes_scale, tick_scale = draw(st.integers(4, 52)), draw(st.integers(10, 43))
    mixed = draw(st.booleans())
    fronts, counts, selected = [], [], 0
    for _ in range(draw(st.integers(2, 4))):
        steps = draw(st.lists(st.integers(1, 2**bytes_scale), min_size=1, max_size=3))
        sizes = tuple(accumulate(steps, initial=draw(st.sampled_from([0, 512]))))
        most = 2 ** (draw(st.integers(10, 43)) if mixed else tick_scale)
        drawn = st.sets(st.integers(1, most), min_size=len(sizes), max_size=len(sizes))
        ticks = draw(drawn if fronts else st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
        fronts.append((sizes, tuple(each / TICKS_PER_MS for each in sorted(ticks, reverse=True))))
        counts.append(draw(st.sampled_from([1, 1, 1, 2])))
        selected += draw(st.sampled_from(sizes)) * counts[-1]
    least, most = (sum(sizes[end] * count for (sizes, _), count in zip(fronts, counts, strict=True)) for end in (0, -1))
    total = draw(st.sampled_from([selected, selected - 1]) | st.integers(least, most - 1))
    return fronts, counts, min(max(total, least), most - 1)


def ticks_of(time_ms):
    return round(time_ms * TICKS_PER_MS)


@st.composite
def tied_divisions(draw, most=5):
    """Draw a division with times of few whole milliseconds, so that many divisions are equally fast."""
    fronts, counts = [], []
    for _ in range(draw(st.integers(2, most))):
        times = sorted(draw(st.sets(st.integers(1, 12), min_size=2, max_size=5)), reverse=True)
        steps = draw(st.lists(st.integers(1, 6), min_size=len(times) - 1, max_size=len(times) - 1))
        fronts.append(((0, *accumulate(steps)), tuple(map(float, times))))
        counts.append(draw(st.integers(1, 6)))
    all_fastest = sum(sizes[-1] * count for (sizes, _), count in zip(fronts, counts, strict=True))
    return fronts, counts, draw(st.integers(1, all_fastest))


def optimum(given_fronts, counts, total):
    """Return ticks and bytes of the fastest division with the fewest bytes, kernel by kernel over all bytes."""
    ticks, held, _ = latest_optimum(given_fronts, counts, total)
    return ticks, held


def latest_optimum(given_fronts, counts, total):
    """Return ticks, bytes and lateness of the fastest division with the fewest bytes; of several, of the latest."""
    best = {0: (0, 0)}
    for choice, ((sizes, times), count) in enumerate(zip(given_fronts, counts, strict=True)):
        points = [(size, ticks_of(time)) for size, time in zip(sizes, times, strict=True)]
        for _ in range(count):
            reached = {}
            for held, (ticks, early) in best.items():
                for size, time in points:
                    to, way = held + size, (ticks + time, early - choice * size)
                    if to <= total and (to not in reached or way < reached[to]):
                        reached[to] = way
            best = reached
    ticks, held, early = min((ticks, held, early) for held, (ticks, early) in best.items())
    return ticks, held, -early


def lateness_of(given_fronts, found):
    """Return how late the choices are that have the bytes: the sum of each one's bytes times its index."""
    rows = enumerate(zip(given_fronts, found, strict=True))
    return sum(choice * sizes[index] * count for choice, ((sizes, _), row) in rows for index, count in row.items())


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


def is_installed(name):
    try:
        return name in (SolverName.AUTO, SolverName.HIGHS) or bool(integer_program._engine(name))
    except SolverUnavailableError:
        return False
