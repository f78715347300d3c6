"""Lifetimes of memory for the tests of pools: at random, and the sequence that no pool can place without a gap."""

from hypothesis import strategies as st

from ucudnn.memory.simulation.result import Lifetime


def lives(*pieces):
    """Return lifetimes from (bytes, begin, end); the storage is the place in the list."""
    return [Lifetime(index, index, size, begin, end) for index, (size, begin, end) in enumerate(pieces)]


@st.composite
def random_lifetimes(draw, most=25):
    pieces = []
    for _ in range(draw(st.integers(0, most))):
        begin = draw(st.integers(0, 20))
        pieces.append((draw(st.integers(1, 30)), begin, begin + draw(st.integers(1, 8))))
    return lives(*pieces)


def unavoidable_gaps():
    """Return the vDNN study's sequence a11 a12 a13 a14 d1 a22 a23 a24 d2 a33 a34 d3 a44 d4 (section 6.1).

    Piece a_ij comes between frees d_(i-1) and d_i and goes with d_j. All of the same i have the same size, and before
    each free the pieces fill 144 bytes: sizes 36, 12, 24, 72.
    """
    sizes = {1: 36, 2: 12, 3: 24, 4: 72}
    events = ["a11", "a12", "a13", "a14", "d1", "a22", "a23", "a24", "d2", "a33", "a34", "d3", "a44", "d4"]
    return lives(
        *((sizes[int(name[1])], at, events.index(f"d{name[2]}")) for at, name in enumerate(events) if name[0] == "a")
    )


def least_extent(lifetimes):
    """Return the smallest pool that holds the pieces, by trying every order in which they may be stacked.

    In a smallest pool each piece can be lowered until it rests on the ground or on another one, so some order in which
    each piece takes the lowest free place leads to it.
    """
    best = [sum(life.size for life in lifetimes)]
    seen = set()

    def extend(placed, extent):
        state = tuple(sorted(placed.items()))
        if extent >= best[0] or state in seen:
            return
        seen.add(state)
        if len(placed) == len(lifetimes):
            best[0] = extent
        for index, life in enumerate(lifetimes):
            if index not in placed:
                address = _lowest(lifetimes, placed, life)
                extend({**placed, index: address}, max(extent, address + life.size))

    extend({}, 0)
    return best[0]


def _lowest(lifetimes, placed, life):
    beside = [each for each in placed if lifetimes[each].begin < life.end and life.begin < lifetimes[each].end]
    address = 0
    for low, high in sorted((placed[each], placed[each] + lifetimes[each].size) for each in beside):
        if low - address >= life.size:
            break
        address = max(address, high)
    return address
