from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ucudnn.solvers.linear_relaxation import relax


@st.composite
def divisions(draw):
    """Draw fronts with counts, and a total that is enough for every first point."""
    fronts, counts = [], []
    for _ in range(draw(st.integers(1, 4))):
        sizes = sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=5)))
        times = sorted(draw(st.sets(st.integers(1, 100), min_size=len(sizes), max_size=len(sizes))), reverse=True)
        fronts.append([(size, float(time)) for size, time in zip(sizes, times, strict=True)])
        counts.append(draw(st.integers(1, 2)))
    least = sum(front[0][0] * count for front, count in zip(fronts, counts, strict=True))
    return fronts, counts, least + draw(st.integers(0, 100))


def best_by_force(fronts, counts, total):
    """Return the least time, and which points a fastest division can hold."""
    singles = [
        (index, front) for index, (front, count) in enumerate(zip(fronts, counts, strict=True)) for _ in range(count)
    ]
    options = [
        (sum(point[1] for point in points), points)
        for points in product(*(front for _, front in singles))
        if sum(point[0] for point in points) <= total
    ]
    best = min(time for time, _ in options)
    return best, [
        [(choice, point) for (choice, _), point in zip(singles, points, strict=True)]
        for time, points in options
        if time == best
    ]


@given(divisions())
def test_bounds_hold_and_nothing_needed_is_closed(drawn):
    fronts, counts, total = drawn
    relaxation = relax(fronts, counts, total)
    best, optima = best_by_force(fronts, counts, total)
    assert relaxation.bound_ms <= best + 1e-9
    assert best <= relaxation.value_ms + 1e-9
    if relaxation.proves_optimal:
        assert abs(relaxation.value_ms - best) < 1e-6
    # Some optimum must be left among the open points.
    assert any(
        all(fronts[choice].index(point) in relaxation.open_points[choice] for choice, point in optimum)
        for optimum in optima
    )


@given(divisions())
def test_the_division_found_is_one(drawn):
    fronts, counts, total = drawn
    relaxation = relax(fronts, counts, total)
    assert [sum(row) for row in relaxation.counts] == counts
    assert all(count >= 0 for row in relaxation.counts for count in row)
    held = [
        (count * size, count * time)
        for front, row in zip(fronts, relaxation.counts, strict=True)
        for (size, time), count in zip(front, row, strict=True)
    ]
    assert sum(size for size, _ in held) <= total
    assert abs(sum(time for _, time in held) - relaxation.value_ms) < 1e-9
    for row, opened in zip(relaxation.counts, relaxation.open_points, strict=True):
        assert {index for index, count in enumerate(row) if count} <= set(opened)
