"""Kernels on dense memory for sums in float32: they add a part to a sum, round a sum, and widen tensors of 16 bits.

They are written in PTX, which the driver compiles. Each thread changes four elements, so that they run at the speed of
memory. All arithmetic is in float32, and results of 16 bits are rounded to nearest even, once.
"""

import struct
from enum import Enum
from functools import cache
from typing import final

from ucudnn.backends.cudnn.gpu.driver import Function
from ucudnn.backends.cudnn.gpu.strided_copy import EACH, MOST_ELEMENTS, THREADS, Copy, module_of, queued
from ucudnn.errors import BackendError
from ucudnn.problem import DataType

_ARGUMENT = struct.Struct("<QQIIff")  # to, from, number of elements, whether the target is read, alpha, beta


class SumKernel(Enum):
    """What a kernel computes: to = alpha * from + beta * to. The value is the type that it reads and that it writes.

    ADD: a part is added to a float32 sum, or copied. ROUND: a sum is rounded to the output.
    """

    ADD_FLOAT32 = (DataType.FLOAT32, DataType.FLOAT32)
    ADD_FLOAT16 = (DataType.FLOAT16, DataType.FLOAT32)
    ADD_BFLOAT16 = (DataType.BFLOAT16, DataType.FLOAT32)
    ROUND_FLOAT16 = (DataType.FLOAT32, DataType.FLOAT16)
    ROUND_BFLOAT16 = (DataType.FLOAT32, DataType.BFLOAT16)

    @classmethod
    def widening(cls, dtype: DataType) -> "SumKernel":
        """Return the kernel that adds or copies elements of a type to float32."""
        return cls((dtype, DataType.FLOAT32))

    @classmethod
    def rounding(cls, dtype: DataType) -> "SumKernel":
        """Return the kernel that rounds float32 to a type of 16 bits."""
        return cls((DataType.FLOAT32, dtype))


@final
class SumKernels:
    """The kernels, loaded in the context that is current."""

    def __init__(self) -> None:
        self._functions = {each: Function(_source(each), _name(each)) for each in SumKernel}

    def bound(
        self, kernel: SumKernel, to: int, source: int, count: int, *, alpha: float = 1.0, beta: float = 0.0
    ) -> Copy:
        """Return to = alpha * source + beta * to on so many elements; at beta = 0, the target is not read."""
        if not 0 < count < MOST_ELEMENTS:
            raise BackendError(f"{count} elements cannot be counted in 31 bits")
        argument = _ARGUMENT.pack(to, source, count, int(beta != 0), alpha, beta)
        return queued(self._functions[kernel], count, argument)


def _name(kernel: SumKernel) -> str:
    return f"ucudnn_{kernel.name.lower()}"


@cache
def _source(kernel: SumKernel) -> bytes:
    read, written = kernel.value
    registers = [
        ".reg .pred %in, %old, %odd;",
        ".reg .b16 %half;",
        ".reg .u32 %index, %total, %reads, %word, %low;",
        ".reg .u64 %at;",
        ".reg .f32 %alpha, %beta, %value, %before;",
    ]
    lines = [
        "ld.param.u32 %total, [argument+16];",
        "ld.param.u32 %reads, [argument+20];",
        "ld.param.f32 %alpha, [argument+24];",
        "ld.param.f32 %beta, [argument+28];",
    ]
    for k in range(EACH):
        lines += [
            f"add.u32 %index, %first, {k * THREADS};",
            "setp.lt.u32 %in, %index, %total;",
            "setp.ne.u32 %old, %reads, 0;",
            "and.pred %old, %old, %in;",
            f"mad.wide.u32 %at, %index, {read.itemsize}, %from;",
            *_load("%value", read, "%in"),
            "mul.rn.f32 %value, %value, %alpha;",
            f"mad.wide.u32 %at, %index, {written.itemsize}, %to;",
            *_load("%before", written, "%old"),
            "@%old fma.rn.f32 %value, %before, %beta, %value;",
            *_store(written),
        ]
    return module_of(_name(kernel), _ARGUMENT.size, registers, lines)


def _load(register: str, dtype: DataType, guard: str) -> tuple[str, ...]:
    if dtype is DataType.FLOAT32:
        return "mov.u32 %word, 0;", f"@{guard} ld.global.u32 %word, [%at];", f"mov.b32 {register}, %word;"
    load = "mov.u32 %word, 0;", f"@{guard} ld.global.u16 %word, [%at];"
    if dtype is DataType.BFLOAT16:  # the upper half of a float32
        return *load, "shl.b32 %word, %word, 16;", f"mov.b32 {register}, %word;"
    return *load, "cvt.u16.u32 %half, %word;", f"cvt.f32.f16 {register}, %half;"


def _store(dtype: DataType) -> tuple[str, ...]:
    """Return the instructions that round a float32 to nearest even, and store it where it is inside the target."""
    if dtype is DataType.FLOAT32:
        return "mov.b32 %word, %value;", "@%in st.global.u32 [%at], %word;"
    if dtype is DataType.FLOAT16:
        convert = "cvt.rn.f16.f32 %half, %value;", "cvt.u32.u16 %word, %half;"
        return *convert, "@%in st.global.u16 [%at], %word;"
    return (  # for GPUs before Ampere, too, which lack the instruction
        "mov.b32 %word, %value;",
        "shr.u32 %low, %word, 16;",
        "and.b32 %low, %low, 1;",
        "add.u32 %low, %low, 32767;",
        "add.u32 %word, %word, %low;",
        "shr.u32 %word, %word, 16;",
        "setp.nan.f32 %odd, %value, %value;",
        "@%odd mov.u32 %word, 32767;",  # adding could have made an infinity or a zero of it
        "@%in st.global.u16 [%at], %word;",
    )
