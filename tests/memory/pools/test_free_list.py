"""Tests of the free list: best fit, first fit and joined holes are those of a map of single bytes."""

from hypothesis import given
from hypothesis import strategies as st

from ucudnn.memory.pools.free_list import FreeList, Holes


@given(st.lists(st.tuples(st.sampled_from(["best", "first", "free"]), st.integers(1, 9)), min_size=20, max_size=40))
def test_no_byte_is_handed_out_twice_and_none_is_lost(steps):
    space, used = FreeList(), {}
    for kind, number in steps:
        if kind != "free":
            before = space.top
            holes = free_runs(used, before)
            fitting = [hole for _, hole in holes if hole >= number]
            assert space.best_hole(number) == min(fitting, default=None)
            assert space.largest_hole == max((hole for _, hole in holes), default=0)
            address = space.take_best(number) if kind == "best" else space.take_first(number)
            assert address == expected(holes, number, before, best=kind == "best")
            assert not any(address < a + size and a < address + number for a, size in used.items())
            used[address] = number
        elif used:
            address = sorted(used)[number % len(used)]
            space.give_back(address, used.pop(address))
        assert space.top == max((address + size for address, size in used.items()), default=0)


def free_runs(used, top):
    """Return (address, bytes) of the holes below the top, found byte by byte."""
    taken = {byte for address, size in used.items() for byte in range(address, address + size)}
    runs = []
    for byte in range(top):
        if byte not in taken:
            if runs and sum(runs[-1]) == byte:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((byte, 1))
    return runs


def expected(holes, size, top, best):
    fitting = [(hole if best else 0, address) for address, hole in holes if hole >= size]
    return min(fitting)[1] if fitting else top


@given(st.data())
def test_holes_are_the_bytes_that_nobody_took(data):
    holes, free = Holes([(0, 60)]), set(range(60))
    pieces = []
    for _ in range(20):
        size = data.draw(st.integers(1, 20))
        runs = [(begin, stop) for begin in free if begin - 1 not in free for stop in [_stop(begin, free)]]
        fitting = sorted((stop - begin, begin) for begin, stop in runs if stop - begin >= size)
        assert holes.ends == dict(runs)
        assert holes.best(size) == (fitting[0][1] if fitting else None)
        assert [(stop - begin, begin) for begin, stop in holes.of_at_least(size)] == fitting
        if pieces and (not fitting or data.draw(st.booleans())):
            address, size = pieces.pop(data.draw(st.integers(0, len(pieces) - 1)))
            merged = holes.merged(address, size)
            assert holes.give_back(address, size) == merged
            free.update(range(address, address + size))
        elif fitting:
            before, others = dict(holes.ends), holes.copy()
            assert others.take_best(size) == fitting[0][1]
            assert (holes.ends, holes.best(1)) == (before, min((stop - begin, begin) for begin, stop in runs)[1])
            length, begin = data.draw(st.sampled_from(fitting))
            address = begin + data.draw(st.integers(0, length - size))
            if data.draw(st.booleans()):
                assert holes.take(address, size) == (begin, begin + length)
            else:
                holes, address = others, fitting[0][1]
            free.difference_update(range(address, address + size))
            pieces.append((address, size))


def _stop(begin, free):
    return next(each for each in range(begin, 61) if each not in free)
