"""Kernels that copy the elements that strides read of a tensor to dense memory, and back.

They are written in PTX, which the driver compiles. Each writes its output once and in order, four elements a thread, so
that it runs at the speed of memory. Strided copies of libraries take up to three times as long.
"""

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from math import ceil, prod
from typing import final

from ucudnn.backends.cudnn.gpu.driver import Function
from ucudnn.errors import BackendError

MOST_ELEMENTS = 1 << 31
"""Tensors must have fewer elements, because they are counted in 32 bits."""

THREADS = 256
EACH = 4  # elements that a thread writes
_WIDTHS = ((2, 2), (2, 4), (4, 4), (4, 8), (8, 8))  # bytes of an element that is read, and of one that is written

Copy = Callable[[int], None]
"""Queues a copy on the stream whose address it is called with; raises BackendError if the driver refuses it."""

Sizes3d = tuple[int, int, int]
"""Sizes of three spatial dimensions, or steps in them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPattern:
    """Which element of the source is written to which element of the target, in planes for samples and channels.

    If the steps divide d, h and w, the target's element (plane, d, h, w) is the source's element number
    `plane * factors[0] + d // steps[0] * factors[1] + ...`. Otherwise it is zero.

    Attributes:
        planes: number of planes.
        sizes: sizes of a plane of the target.
        steps: steps in the three dimensions of the target.
        factors: distance in the source, in elements, of successive planes, and of successive steps in each dimension.
        read_bytes: bytes of an element of the source.
        written_bytes: bytes of an element of the target; an element and the zero that always follows it may count as
            one.
    """

    planes: int
    sizes: Sizes3d
    steps: Sizes3d
    factors: tuple[int, int, int, int]
    read_bytes: int
    written_bytes: int

    @property
    def elements(self) -> int:
        """Number of elements that are written."""
        return self.planes * prod(self.sizes)

    def packed(self, to: int, source: int, *, fills: bool) -> bytes:
        """Return the argument of the kernel, which `fills` with zeros what lies between the steps, or leaves it."""
        divisors = (*reversed(self.sizes), *reversed(self.steps))
        numbers = chain.from_iterable((each, *magic(each)) for each in divisors)
        return _ARGUMENT.pack(to, source, self.elements, fills, *numbers, *self.factors)


def gathering(planes: int, sizes: Sizes3d, steps: Sizes3d, itemsize: int) -> CopyPattern:
    """Return the pattern that copies the elements that steps reach in planes of some sizes to dense memory."""
    _, h, w = sizes
    return CopyPattern(
        planes=planes,
        sizes=reached(sizes, steps),
        steps=(1, 1, 1),
        factors=(prod(sizes), steps[0] * h * w, steps[1] * w, steps[2]),
        read_bytes=itemsize,
        written_bytes=itemsize,
    )


def scattering(planes: int, sizes: Sizes3d, steps: Sizes3d, itemsize: int) -> CopyPattern:
    """Return the pattern that copies dense memory to the elements that steps reach in planes of some sizes."""
    _, h, w = within = reached(sizes, steps)
    return CopyPattern(
        planes=planes,
        sizes=sizes,
        steps=steps,
        factors=(prod(within), h * w, w, 1),
        read_bytes=itemsize,
        written_bytes=itemsize,
    )


def scattering_pairs(planes: int, sizes: Sizes3d, steps: Sizes3d, itemsize: int) -> CopyPattern | None:
    """Return `scattering` in pairs of elements, the second of which is always zero; None if that is not so."""
    if steps[2] != 2 or sizes[2] % 2 or (itemsize, 2 * itemsize) not in _WIDTHS:
        return None
    single = scattering(planes, sizes, steps, itemsize)
    d, h, w = sizes
    return replace(single, sizes=(d, h, w // 2), steps=(*steps[:2], 1), written_bytes=2 * itemsize)


def reached(sizes: Sizes3d, steps: Sizes3d) -> Sizes3d:
    """Return the number of elements that steps reach in each dimension."""
    d, h, w = (ceil(size / step) for size, step in zip(sizes, steps, strict=True))
    return d, h, w


def magic(divisor: int) -> tuple[int, int]:
    """Return m and s such that n // divisor is ((m * n >> 32) + n) >> s for every n below 2^31.

    Method: Granlund and Montgomery, "Division by Invariant Integers using Multiplication" (1994), figure 4.1.
    """
    shift = (divisor - 1).bit_length()
    return ((1 << 32) * ((1 << shift) - divisor)) // divisor + 1, shift


@final
class Copier:
    """The kernels, loaded in the context that is current."""

    def __init__(self) -> None:
        self._functions = {widths: Function(_source(*widths), _name(*widths)) for widths in _WIDTHS}

    def bound(self, pattern: CopyPattern, to: int, source: int, *, fills: bool = True) -> Copy:
        """Return a copy from one address to another, which only needs to be queued."""
        function = self._functions[pattern.read_bytes, pattern.written_bytes]
        return queued(function, pattern.elements, pattern.packed(to, source, fills=fills))


def queued(function: Function, elements: int, argument: bytes) -> Copy:
    """Return the launch of a kernel of which each thread writes four elements."""
    launch = function.bound(ceil(elements / (THREADS * EACH)), THREADS, argument)

    def queue(stream: int) -> None:
        try:
            launch(stream)
        except OSError as error:
            raise BackendError(str(error)) from None

    return queue


def module_of(name: str, argument_bytes: int, registers: Iterable[str], lines: Iterable[str]) -> bytes:
    """Return a module with one kernel. A block writes adjacent elements, each of its threads every 256th.

    Args:
        name: name of the kernel.
        argument_bytes: size of its argument, which begins with the addresses of target and source.
        registers: their declarations.
        lines: its instructions; %first is the number of a thread's first element.
    """
    begin = (
        ".version 6.0",
        ".target sm_50",
        ".address_size 64",
        f".visible .entry {name}(.param .align 8 .b8 argument[{argument_bytes}])",
        "{",
        ".reg .u64 %to, %from;",
        ".reg .u32 %first, %block;",
        *registers,
        "ld.param.u64 %to, [argument];",
        "ld.param.u64 %from, [argument+8];",
        "mov.u32 %block, %ctaid.x;",
        "mov.u32 %first, %tid.x;",
        f"mad.lo.u32 %first, %block, {THREADS * EACH}, %first;",
    )
    return "\n".join([*begin, *lines, "ret;", "}", ""]).encode()


def _name(read_bytes: int, written_bytes: int) -> str:
    return f"ucudnn_copy_{read_bytes}_{written_bytes}"


_WORDS = (  # the 32-bit words of the argument that follow the two addresses, see `CopyPattern.packed`
    *("total", "fills"),
    *(f"{part}_{of}" for of in ("w", "h", "d", "sw", "sh", "sd") for part in ("divisor", "magic", "shift")),
    *("factor_p", "factor_d", "factor_h", "factor_w"),
)
_ARGUMENT = struct.Struct(f"<QQ{len(_WORDS)}I")


@cache
def _source(read_bytes: int, written_bytes: int) -> bytes:
    wide = written_bytes == 8
    value, bits = ("%long", "u64") if wide else ("%word", "u32")
    registers = [
        f".reg .pred %in<{EACH}>, %on<{EACH}>, %has<{EACH}>, %all;",
        f".reg .u64 %at, %put<{EACH}>, %long<{EACH}>;",
        f".reg .u32 %i<{EACH}>, %word<{EACH}>, %row, %deep, %plane, %index, %rest, %left, %q;",
        f".reg .u32 %w, %h, %d, {', '.join(f'%{word}' for word in _WORDS)};",
    ]
    lines = [
        *(f"ld.param.u32 %{word}, [argument+{16 + 4 * index}];" for index, word in enumerate(_WORDS)),
        "setp.ne.u32 %all, %fills, 0;",
    ]
    for k in range(EACH):
        lines += [
            f"add.u32 %i{k}, %first, {k * THREADS};",
            f"setp.lt.u32 %in{k}, %i{k}, %total;",
            *_divide("%row", "%w", f"%i{k}", "w"),
            *_divide("%deep", "%h", "%row", "h"),
            *_divide("%plane", "%d", "%deep", "d"),
            "mul.lo.u32 %index, %plane, %factor_p;",
            "mov.u32 %rest, 0;",
        ]
        for of in ("d", "h", "w"):
            lines += [
                *_divide("%q", "%left", f"%{of}", f"s{of}"),
                "or.b32 %rest, %rest, %left;",
                f"mad.lo.u32 %index, %q, %factor_{of}, %index;",
            ]
        lines += [
            f"setp.eq.u32 %has{k}, %rest, 0;",
            f"and.pred %on{k}, %has{k}, %in{k};",
            f"mad.wide.u32 %at, %index, {read_bytes}, %from;",
            f"mad.wide.u32 %put{k}, %i{k}, {written_bytes}, %to;",
            f"mov.{bits} {value}{k}, 0;",
            f"@%on{k} ld.global.u{8 * read_bytes} {value}{k}, [%at];",
            f"and.pred %has{k}, %in{k}, %all;",
            f"or.pred %has{k}, %has{k}, %on{k};",
        ]
    lines += [f"@%has{k} st.global.u{8 * written_bytes} [%put{k}], {value}{k};" for k in range(EACH)]
    return module_of(_name(read_bytes, written_bytes), _ARGUMENT.size, registers, lines)


def _divide(quotient: str, remainder: str, number: str, divisor: str) -> tuple[str, ...]:
    return (
        f"mul.hi.u32 {quotient}, {number}, %magic_{divisor};",
        f"add.u32 {quotient}, {quotient}, {number};",
        f"shr.u32 {quotient}, {quotient}, %shift_{divisor};",
        f"mul.lo.u32 {remainder}, {quotient}, %divisor_{divisor};",
        f"sub.u32 {remainder}, {number}, {remainder};",
    )
