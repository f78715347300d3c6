"""An interpreter of as much of PTX as the kernels use: all threads at once, instruction by instruction."""

import re
from contextlib import contextmanager

import numpy as np
import pytest

_GUARDED = re.compile(r"@(%\w+) (.*)")
_DECLARED = re.compile(r"\.reg \.(\w+) (.*);")
_TYPES = {"u16": np.uint16, "u32": np.uint32, "u64": np.uint64}


class Memory:
    """Bytes at an address, outside which nothing may be read or written."""

    def __init__(self, size, address):
        self.address = address
        self.bytes = np.full(size, 0xFF, np.uint8)

    def places(self, addresses, size):
        first = addresses.astype(np.int64) - self.address
        assert (first >= 0).all(), "before the tensor"
        assert (first + size <= self.bytes.size).all(), "behind the tensor"
        assert (addresses % size == 0).all(), "not aligned"
        return first[:, None] + np.arange(size)


class Interpreted:
    """A kernel that is interpreted where a driver's `Function` would be launched."""

    memories: tuple[Memory, ...] = ()

    def __init__(self, source, name):
        self.source, self.name = source, name

    def bound(self, blocks, threads, argument):
        return lambda stream: run(self.source, self.name, blocks, threads, argument, Interpreted.memories)


@contextmanager
def interpreted(module):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Function", Interpreted)
        yield


def loaded(source, written):
    """Return two tensors that kernels reach: one with the bytes of `source`, and one with those of `written`."""
    memories = Memory(source.nbytes, 1 << 40), Memory(written.nbytes, 3 << 40)
    for memory, array in zip(memories, (source, written), strict=True):
        memory.bytes[:] = np.frombuffer(array.tobytes(), np.uint8)
    Interpreted.memories = memories
    return memories


def run(source, name, blocks, threads, argument, memories):
    """Run one kernel; `memories` hold what addresses point to."""
    lines = [line.strip() for line in source.decode().split(f".entry {name}(")[1].split("\n}")[0].splitlines()[2:]]
    count = blocks * threads
    ids = np.arange(count, dtype=np.uint64)
    registers, widths = {"%ctaid.x": ids // threads, "%tid.x": ids % threads}, {}
    for line in lines:
        declared = _DECLARED.fullmatch(line)
        if declared:
            names = (each.strip() for each in declared[2].split(","))
            for register in names:
                family = re.fullmatch(r"(%\w+)<(\d+)>", register)
                for one in [f"{family[1]}{k}" for k in range(int(family[2]))] if family else [register]:
                    assert one not in widths, f"{one} is declared twice"
                    widths[one] = {"pred": 1, "b16": 16, "u32": 32, "f32": 32, "u64": 64}[declared[1]]
        elif line != "ret;":
            _step(line.removesuffix(";"), registers, widths, argument, memories, count)


def _step(line, registers, widths, argument, memories, count):
    guard = _GUARDED.fullmatch(line)
    active = registers[guard[1]].astype(bool) if guard else np.ones(count, bool)
    operation, _, operands = (guard[2] if guard else line).partition(" ")
    names = [each.strip() for each in operands.split(",")]
    kind = operation.split(".")

    def value(name):
        if name.startswith("%"):
            return registers[name]
        return np.full(count, int(name), np.uint64)

    if kind[:2] == ["ld", "param"]:
        at = int(names[1].strip("[]").partition("+")[2] or 0)
        size = int(kind[2][1:]) // 8
        result = np.full(count, int.from_bytes(argument[at : at + size], "little"), np.uint64)
    elif kind[0] in ("ld", "st"):
        if not active.any():
            return
        address = registers[names[kind[0] == "ld"].strip("[]")][active]
        dtype = _TYPES[kind[2]]
        memory = max((each for each in memories if each.address <= address.max()), key=lambda each: each.address)
        places = memory.places(address, np.dtype(dtype).itemsize)
        if kind[0] == "st":
            memory.bytes[places] = registers[names[1]][active].astype(dtype)[:, None].view(np.uint8)
            return
        result = registers[names[0]].copy()
        result[active] = memory.bytes[places].view(dtype)[:, 0]
    else:
        result = _computed(kind, [value(each) for each in names[1:]])
        if guard:
            result = np.where(active, result, registers[names[0]])
    registers[names[0]] = result & np.uint64((1 << widths[names[0]]) - 1)


_LOW = np.uint64(0xFFFFFFFF)
_OPERATIONS = {
    "mov": lambda a: a,
    "mul.hi": lambda a, b: (a * b) >> np.uint64(32),
    "mul.lo": lambda a, b: a * b & _LOW,
    "mad.lo": lambda a, b, c: a * b + c & _LOW,
    "mad.wide": lambda a, b, c: a * b + c,
    "add": lambda a, b: a + b & _LOW,
    "sub": lambda a, b: a - b & _LOW,
    "shr": lambda a, b: a >> b,
    "or": lambda a, b: a | b,
    "and": lambda a, b: a & b,
    "setp.lt": lambda a, b: (a < b).astype(np.uint64),
    "setp.eq": lambda a, b: (a == b).astype(np.uint64),
    "setp.ne": lambda a, b: (a != b).astype(np.uint64),
}


def _number(bits, dtype=np.float32):
    return bits.astype({np.float16: np.uint16, np.float32: np.uint32}[dtype]).view(dtype)


def _bits(numbers, dtype=np.float32):
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = numbers.astype(dtype)
    return rounded.view({np.float16: np.uint16, np.float32: np.uint32}[dtype]).astype(np.uint64)


def _multiplied_and_added(a, b, c):
    """Return a * b + c, which float64 rounds once more than the GPU does, far behind the last bit of float32."""
    with np.errstate(invalid="ignore"):
        return _bits(_number(a).astype(np.float64) * _number(b) + _number(c))


_OPERATIONS |= {
    "shl": lambda a, b: a << b & _LOW,
    "mul.rn": lambda a, b: _multiplied_and_added(a, b, np.zeros_like(a)),
    "fma": _multiplied_and_added,
    "setp.nan": lambda a, b: (np.isnan(_number(a)) | np.isnan(_number(b))).astype(np.uint64),
    "cvt.u16": lambda a: a & np.uint64(0xFFFF),
    "cvt.u32": lambda a: a,
    "cvt.f32": lambda a: _bits(_number(a, np.float16).astype(np.float32)),
    "cvt.rn": lambda a: _bits(_number(a), np.float16),
}


def _computed(kind, values):
    return _OPERATIONS[".".join(kind[: 2 if kind[0] in ("mul", "mad", "setp", "cvt") else 1])](*values)
