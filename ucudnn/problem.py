"""The problem of one convolution call. It is immutable and hashable, and the key of every cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import lru_cache, partial
from math import gcd, prod
from operator import attrgetter

from ucudnn.errors import InvalidProblemError
from ucudnn.units import shortened, whole_number, whole_numbers

MOST_ALIGNMENT = 16
"""The largest alignment in bytes that a kernel of cuDNN asks for."""

WITH_BIAS = " with bias"
"""The end of the text of a problem that has a bias."""

MOST_SIZE = 2**31 - 1
"""The largest size that cuDNN's tensor descriptors take, because they count in 32 bits."""


class Operation(Enum):
    """The three convolution operations of cuDNN (paper, section 2)."""

    FORWARD = "Forward"
    BACKWARD_DATA = "BackwardData"
    BACKWARD_FILTER = "BackwardFilter"


class DataType(Enum):
    """The type of a tensor's elements. Sums are in float32, and those of float64 in float64."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"

    @property
    def itemsize(self) -> int:
        """Number of bytes of one element."""
        return {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[self.value]

    @property
    def has_16_bits(self) -> bool:
        """Whether the type is float16 or bfloat16."""
        return self.itemsize == 2


class Layout(Enum):
    """The order of a tensor's dimensions in memory, for one to three spatial dimensions.

    Filters have the same order as tensors: (filters, channels, kernel) or (filters, kernel, channels).
    """

    NCW = "NCW"
    NWC = "NWC"
    NCHW = "NCHW"
    NHWC = "NHWC"
    NCDHW = "NCDHW"
    NDHWC = "NDHWC"

    @property
    def dimensions(self) -> int:
        """The number of spatial dimensions."""
        return len(self.value) - 2

    @property
    def channels_last(self) -> bool:
        """Whether the channels are the innermost dimension."""
        return self.value.endswith("C")

    @classmethod
    def channels_first(cls, dimensions: int) -> "Layout":
        """Return NCW, NCHW or NCDHW.

        Raises:
            InvalidProblemError: if there are not 1 to 3 spatial dimensions.
        """
        if dimensions not in (1, 2, 3):
            raise InvalidProblemError(f"{dimensions} spatial dimensions: a convolution has 1, 2 or 3")
        return (cls.NCW, cls.NCHW, cls.NCDHW)[dimensions - 1]

    def arrange(self, outer: int, channels: int, spatial: Sequence[int]) -> tuple[int, ...]:
        """Return a shape in this layout from its outermost size, its channels and its spatial sizes."""
        return (outer, *spatial, channels) if self.channels_last else (outer, channels, *spatial)


class MathMode(Enum):
    """How float32 may be multiplied. cuDNN's default allows TF32 on tensor cores; FMA does not."""

    TF32 = "tf32"
    FMA = "fma"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionProblem:
    """One convolution call: its operation, shapes, types and layout, and the algorithms that it allows.

    The tensors are x (the input or its gradient), w (the filters or their gradient) and y (the output or its gradient).
    The operation says which of them is written. Spatial sizes, kernel, padding, stride and dilation have one entry for
    each spatial dimension, with the outermost one first.

    Attributes:
        operation: Forward (x, w -> y), BackwardData (w, y -> x) or BackwardFilter (x, y -> w).
        batch: mini-batch size N.
        channels: channels C of x.
        spatial: spatial sizes of x.
        filters: filters K, the channels of y.
        kernel: spatial sizes of w.
        padding: zeros added before x in each dimension; 0 by default.
        post_padding: zeros added after x in each dimension; () if they are as many as before x. See `paddings`.
        stride: distance between two applications of the filter; 1 by default.
        dilation: distance between two taps of the filter; 1 by default.
        groups: channel groups; w has channels / groups channels.
        dtype: type of all three tensors.
        layout: order of dimensions; channels first by default.
        x_batch_stride: elements from one sample of x to the next; dense (the default) or larger.
        y_batch_stride: the same for y.
        x_channel_stride: elements from one channel of x to the next; 0 if there are no gaps between them.
        y_channel_stride: the same for y.
        math: whether float32 may be multiplied as TF32.
        deterministic: whether the algorithm must repeat its results to the bit.
        alignment: the addresses of all three tensors are multiples of so many bytes; a power of two up to 16.
        float32_sum: whether w is float32 beside x and y of 16 bits: a filter gradient that is not rounded yet.
        biased: whether a bias is added to each channel of y, of the type of y. It comes with w (`BiasedFilters`).

    Raises:
        InvalidProblemError: if this is no convolution. The message names the offending value.
    """

    operation: Operation
    batch: int
    channels: int
    spatial: tuple[int, ...]
    filters: int
    kernel: tuple[int, ...]
    padding: tuple[int, ...] = ()
    post_padding: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    dtype: DataType = DataType.FLOAT32
    layout: Layout = None  # type: ignore[assignment]  # its default depends on `spatial`: see __post_init__
    x_batch_stride: int = 0
    y_batch_stride: int = 0
    x_channel_stride: int = 0
    y_channel_stride: int = 0
    math: MathMode = MathMode.TF32
    deterministic: bool = False
    alignment: int = MOST_ALIGNMENT
    float32_sum: bool = False
    biased: bool = False
    _output: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, kind in ENUM_FIELDS.items():
            given = getattr(self, name)
            if not isinstance(given, kind) and (name, given) != ("layout", None):
                raise InvalidProblemError(f"{name} {shortened(given)} is no {kind.__name__}")
        for name in _NUMBERS:
            self._set(name, whole_number(name, getattr(self, name)))
        for name in _TUPLES:
            self._set(name, whole_numbers(name, getattr(self, name)))
        # Defaults that depend on other fields are filled in, so that equal problems compare equal.
        dimensions = len(self.spatial)
        self._set("layout", self.layout or Layout.channels_first(dimensions))
        self._set("padding", self.padding or (0,) * dimensions)
        if self.post_padding == self.padding:
            self._set("post_padding", ())
        self._set("stride", self.stride or (1,) * dimensions)
        self._set("dilation", self.dilation or (1,) * dimensions)
        self._check_sizes(dimensions)
        for name, shape in (("x", self.spatial), ("y", self.output)):
            self._set_channel_stride(f"{name}_channel_stride", prod(shape))
            dense = getattr(self, f"{name}_sample")
            given = getattr(self, f"{name}_batch_stride")
            if given and given < dense:
                raise InvalidProblemError(f"{name}_batch_stride {given} is below the {dense} elements of one sample")
            self._set(f"{name}_batch_stride", given or dense)
        if self.alignment not in (1, 2, 4, 8, MOST_ALIGNMENT):
            raise InvalidProblemError(f"alignment {self.alignment} is no power of two up to {MOST_ALIGNMENT}")
        if self.alignment < self.dtype.itemsize:
            raise InvalidProblemError(f"tensors aligned to {self.alignment} bytes cannot hold {self.dtype.value}")
        self._set("_hash", hash(_compared(self)))

    def __hash__(self) -> int:
        """Return the hash of all fields. It is computed once, because each call looks up its problem several times."""
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        # Hashes of strings differ between processes, so an unpickled problem computes its hash again.
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        return partial(ConvolutionProblem, **given), ()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _set_channel_stride(self, name: str, dense: int) -> None:
        given = getattr(self, name)
        if given and self.layout.channels_last:
            raise InvalidProblemError(
                f"{name} {given}: in layout {self.layout.value} channels have no gaps between them"
            )
        if given and given < dense:
            raise InvalidProblemError(f"{name} {given} is below the {dense} elements of one channel")
        if given == dense:
            self._set(name, 0)

    def _check_sizes(self, dimensions: int) -> None:
        if self.layout.dimensions != dimensions:
            raise InvalidProblemError(f"layout {self.layout.value} does not fit spatial sizes {self.spatial}")
        for name in ("kernel", "padding", "post_padding", "stride", "dilation"):
            values = getattr(self, name)
            if len(values) != dimensions and (values or name != "post_padding"):
                raise InvalidProblemError(f"{name} {values} has not one entry for each of {self.spatial}")
        for name in ("batch", "channels", "filters", "groups", *_TUPLES):
            _check_range(name, getattr(self, name), 0 if name.endswith("padding") else 1)
        if self.float32_sum and not self.is_rounded_gradient:
            raise InvalidProblemError(f"only filter gradients of 16 bits have float32_sum, not {self.operation.value}")
        if self.biased and self.operation is not Operation.FORWARD:
            raise InvalidProblemError(f"only Forward adds a bias, not {self.operation.value}")
        for name in ("channels", "filters"):
            if getattr(self, name) % self.groups:
                raise InvalidProblemError(f"{name} {getattr(self, name)} cannot be divided into {self.groups} groups")
        sizes = self.spatial, self.kernel, self.stride, self.dilation, self.paddings
        self._set("_output", tuple(map(_outputs, *sizes)))
        if any(size < 1 for size in self.output):
            after = f" before and {self.post_padding} after" if self.post_padding else ""
            raise InvalidProblemError(
                f"kernel {self.kernel} with dilation {self.dilation} does not fit spatial sizes {self.spatial}"
                f" with padding {self.padding}{after}"
            )

    @property
    def paddings(self) -> tuple[tuple[int, int], ...]:
        """Zeros before and after x in each spatial dimension."""
        return tuple(zip(self.padding, self.post_padding or self.padding, strict=True))

    @property
    def output(self) -> tuple[int, ...]:
        """Spatial sizes of y (cudnnGetConvolutionNdForwardOutputDim)."""
        return self._output

    @property
    def x_sample(self) -> int:
        """Elements from the first to the last one of a sample of x, with the gaps between its channels."""
        return _span(self.channels, self.x_channel_stride, self.spatial)

    @property
    def y_sample(self) -> int:
        """Elements from the first to the last one of a sample of y, with the gaps between its channels."""
        return _span(self.filters, self.y_channel_stride, self.output)

    @property
    def w_sample(self) -> int:
        """Elements of one filter."""
        return self.channels // self.groups * prod(self.kernel)

    @property
    def is_rounded_gradient(self) -> bool:
        """Whether it is a filter gradient of 16 bits, a sum over samples that each addition to w would round."""
        return self.dtype.has_16_bits and self.operation is Operation.BACKWARD_FILTER

    @property
    def w_dtype(self) -> DataType:
        """Type of w."""
        return DataType.FLOAT32 if self.float32_sum else self.dtype

    @property
    def x_shape(self) -> tuple[int, ...]:
        """Shape of x in the memory order of the layout."""
        return self.layout.arrange(self.batch, self.channels, self.spatial)

    @property
    def w_shape(self) -> tuple[int, ...]:
        """Shape of w in the memory order of the layout."""
        return self.layout.arrange(self.filters, self.channels // self.groups, self.kernel)

    @property
    def y_shape(self) -> tuple[int, ...]:
        """Shape of y in the memory order of the layout."""
        return self.layout.arrange(self.batch, self.filters, self.output)

    @property
    def x_bytes(self) -> int:
        """Bytes from the first to the last one of x, with the gaps between its samples."""
        return ((self.batch - 1) * self.x_batch_stride + self.x_sample) * self.dtype.itemsize

    @property
    def w_bytes(self) -> int:
        """Bytes of w."""
        return prod(self.w_shape) * self.w_dtype.itemsize

    @property
    def y_bytes(self) -> int:
        """Bytes from the first to the last one of y, with the gaps between its samples."""
        return ((self.batch - 1) * self.y_batch_stride + self.y_sample) * self.dtype.itemsize

    @property
    def multiplications(self) -> int:
        """Number of multiply-accumulates of the direct method, which is the same for every operation."""
        return self.batch * self.filters * prod(self.output) * self.channels // self.groups * prod(self.kernel)

    def with_batch(self, batch: int) -> "ConvolutionProblem":
        """Return the same problem at another mini-batch size."""
        if type(batch) is not int or not 1 <= batch <= MOST_SIZE:
            return replace(self, batch=batch)  # which raises the error
        return _changed(self, batch=batch)

    def part(self, size: int) -> "ConvolutionProblem":
        """Return the problem of a micro-batch that begins at a multiple of the largest power of two in its size.

        A sample need not have a multiple of 16 bytes, so a micro-batch may be less aligned than the mini-batch.
        """
        return self if size == self.batch else _part(self, size)

    @property
    def steps(self) -> tuple[int, int]:
        """Bytes from one sample to the next in x and in y."""
        return self.x_batch_stride * self.dtype.itemsize, self.y_batch_stride * self.dtype.itemsize

    @property
    def begins_anywhere(self) -> bool:
        """Whether parts may begin at any sample, because each sample is as aligned as the first."""
        return all(step % self.alignment == 0 for step in self.steps)

    def with_operation(self, operation: Operation) -> "ConvolutionProblem":
        """Return another operation on the same tensors, without a bias."""
        if self.float32_sum or not isinstance(operation, Operation):
            return replace(self, operation=operation, biased=False)  # which raises the error, if it is one
        return _changed(self, operation=operation, biased=False)

    def without_bias(self) -> "ConvolutionProblem":
        """Return the same problem without a bias."""
        return _changed(self, biased=False)

    def __str__(self) -> str:
        """Return for example 'Forward 256x64x27x27 * 192x64x5x5 float32 NCHW'; defaults are left out."""
        sizes = f"{'x'.join(map(str, self.x_shape))} * {'x'.join(map(str, self.w_shape))}"
        text = f"{self.operation.value} {sizes}"
        if any((*self.padding, *self.post_padding)):
            text += f" padding {'x'.join(map(str, self.padding))}"
        if self.post_padding:
            text += f" before and {'x'.join(map(str, self.post_padding))} after"
        for name, values in (("stride", self.stride), ("dilation", self.dilation)):
            if any(value != 1 for value in values):
                text += f" {name} {'x'.join(map(str, values))}"
        if self.groups != 1:
            text += f" groups {self.groups}"
        end = " to float32" if self.float32_sum else WITH_BIAS if self.biased else ""
        return f"{text} {self.dtype.value} {self.layout.value}{end}"


ENUM_FIELDS: dict[str, type[Enum]] = {"operation": Operation, "dtype": DataType, "layout": Layout, "math": MathMode}
"""The fields of a problem that are enumerations, with their types."""

_NUMBERS = (
    *("batch", "channels", "filters", "groups", "alignment"),
    *("x_batch_stride", "y_batch_stride", "x_channel_stride", "y_channel_stride"),
)
_TUPLES = ("spatial", "kernel", "padding", "post_padding", "stride", "dilation")
_COPIED = tuple(each.name for each in fields(ConvolutionProblem) if each.name != "_hash")
_copied = attrgetter(*_COPIED)
_compared = attrgetter(*(each.name for each in fields(ConvolutionProblem) if each.compare))


def _check_range(name: str, value: int | tuple[int, ...], least: int) -> None:
    for size in value if isinstance(value, tuple) else (value,):
        if size < least:
            raise InvalidProblemError(f"{name} {shortened(value)} must be {least} or more, in whole numbers")
        if size > MOST_SIZE:
            raise InvalidProblemError(f"{name} {shortened(value)} is more than the {MOST_SIZE} that cuDNN can count")


def _span(channels: int, stride: int, sizes: tuple[int, ...]) -> int:
    return (channels - 1) * (stride or prod(sizes)) + prod(sizes)


@lru_cache(maxsize=1 << 14, typed=True)  # 2.0 is no size, also after 2 was one
def _part(problem: ConvolutionProblem, size: int) -> ConvolutionProblem:
    return _changed(
        problem.with_batch(size), alignment=gcd(problem.alignment, *(size * step for step in problem.steps))
    )


def _outputs(size: int, taps: int, stride: int, dilation: int, padding: tuple[int, int]) -> int:
    return (size + sum(padding) - (taps - 1) * dilation - 1) // stride + 1


def _changed(problem: ConvolutionProblem, **changes: object) -> ConvolutionProblem:
    """Return a problem with other values, which are right. Nothing is checked again, because thousands are made."""
    made = object.__new__(ConvolutionProblem)
    for name, value in zip(_COPIED, _copied(problem), strict=True):
        object.__setattr__(made, name, changes.get(name, value))
    object.__setattr__(made, "_hash", hash(_compared(made)))
    return made
