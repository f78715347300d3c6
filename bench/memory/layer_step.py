"""Training steps as the prototypes of the papers run them: one call of cuDNN for each layer, in place where it can be.

A step that PyTorch runs differs in what it keeps: its ReLU makes a new gradient, its max-pooling keeps indices of eight
bytes, and it keeps gradients of parameters and momentum to the end. vDNN and Dymem are programs of their own around
cuDNN, whose ReLU overwrites the gradient and whose max-pooling reads its input and output again. Parameters are updated
when the layer's backward ends. The study's tables of vDNN show that: its peaks grow with the mini-batch from the bytes
of the parameters alone. `LayerStep` writes such a step down layer by layer, forward first, and adds backward.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ucudnn.memory.step.graph import Affine, Phase, Role, StepGraph, StepOperation, Storage
from ucudnn.problem import ConvolutionProblem, Operation

_BYTES = 4  # of a float32


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """A feature map: the storage that holds it, and its channels and spatial sizes for one sample."""

    storage: int
    channels: int
    spatial: tuple[int, ...]

    @property
    def numbers(self) -> int:
        """Numbers of one sample."""
        return self.channels * prod(self.spatial)


class LayerRules(NamedTuple):
    """What a program around cuDNN may do in one way or another.

    Attributes:
        outputs_held: whether a layer's output stays until the layer's backward has ended, as in the study of vDNN; else
            it is freed behind its last reader.
        momentum: whether the update has momentum, as large as the parameters.
    """

    outputs_held: bool = True
    momentum: bool = False


class LayerStep:
    """Writes a step down. Methods add a layer each, and return its output; `step` returns the whole.

    Args:
        name: of the step.
        rules: what the program leaves open.
        channels: of an image.
        spatial: its sides.
    """

    def __init__(self, name: str, rules: LayerRules, channels: int, *spatial: int) -> None:
        self._name = name
        self._storages: list[Storage] = []
        self._operations: list[StepOperation] = []
        self._backward: list[Callable[[], None]] = []
        self._phase = Phase.FORWARD
        self._layer = ""
        self._layers = 0
        self._gradients: dict[FeatureMap, int] = {}
        self._rules = rules
        self.image = self._map("image", channels, spatial, Role.INPUT)

    def convolve(
        self, x: FeatureMap, filters: int, kernel: int | tuple[int, int], stride: int = 1, padding: int | None = None
    ) -> FeatureMap:
        """Add a convolution, by default padded so that stride 1 keeps the sides."""
        self._begin("conv")
        sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        around = tuple(side // 2 for side in sides) if padding is None else (padding, padding)
        steps = (stride, stride)
        out = tuple((n + 2 * p - k) // s + 1 for n, p, k, s in zip(x.spatial, around, sides, steps, strict=True))
        y = self._map("y", filters, out)
        weights, gradient = self._parameter(filters * x.channels * prod(sides))

        shape: dict[str, Any] = {"channels": x.channels, "spatial": x.spatial, "filters": filters, "kernel": sides}
        call = self._convolution(2 * y.numbers * x.channels * prod(sides), padding=around, stride=steps, **shape)

        def back() -> None:
            dy = self._gradients.pop(y)
            call(Operation.BACKWARD_FILTER, [x.storage, dy], gradient)
            if x is not self.image:
                self._contribute(x, lambda dx: call(Operation.BACKWARD_DATA, [weights, dy], dx))
            self._update(weights, gradient, y)

        call(Operation.FORWARD, [x.storage, weights], y.storage)
        self._end(back)
        return y

    def raise_sides(self, x: FeatureMap, channels: int, kernel: int, stride: int, padding: int) -> FeatureMap:
        """Add a transposed convolution: a BackwardData forward, a Forward backward."""
        self._begin("deconv")
        out = tuple((n - 1) * stride - 2 * padding + kernel for n in x.spatial)
        y = self._map("y", channels, out)
        weights, gradient = self._parameter(channels * x.channels * kernel**2)

        sides, around, steps = (kernel, kernel), (padding, padding), (stride, stride)
        shape: dict[str, Any] = {"channels": channels, "spatial": out, "filters": x.channels, "kernel": sides}
        call = self._convolution(2 * x.numbers * channels * kernel**2, padding=around, stride=steps, **shape)

        def back() -> None:
            dy = self._gradients.pop(y)
            call(Operation.BACKWARD_FILTER, [x.storage, dy], gradient)
            self._contribute(x, lambda dx: call(Operation.FORWARD, [weights, dy], dx))
            self._update(weights, gradient, y)

        call(Operation.BACKWARD_DATA, [x.storage, weights], y.storage)
        self._end(back)
        return y

    def relu(self, x: FeatureMap) -> FeatureMap:
        """Add an activation, which overwrites its input, and in backward the gradient."""
        y = FeatureMap(x.storage, x.channels, x.spatial)
        self._call("relu", [x.storage], [x.storage])

        def back() -> None:
            dy = self._gradients.pop(y)
            self._contribute_in_place(x, dy, "relu_backward", [y.storage])

        self._end(back)
        return y

    def normalize(self, x: FeatureMap) -> FeatureMap:
        """Add batch normalization, whose backward reads its input."""
        self._begin("bn")
        y = self._map("y", x.channels, x.spatial)
        weights, gradient = self._parameter(2 * x.channels)
        self._call("batch_norm", [x.storage, weights], [y.storage])

        def back() -> None:
            dy = self._gradients.pop(y)
            self._contribute(x, lambda dx: self._call("batch_norm_backward", [x.storage, weights, dy], [dx, gradient]))
            self._update(weights, gradient, y)

        self._end(back)
        return y

    def pool(self, x: FeatureMap, kernel: int, stride: int, padding: int = 0, *, maximum: bool = True) -> FeatureMap:
        """Add pooling; the backward of a maximum reads input and output."""
        self._begin("pool")
        y = self._map("y", x.channels, tuple((n + 2 * padding - kernel) // stride + 1 for n in x.spatial))
        self._call("max_pool" if maximum else "average_pool", [x.storage], [y.storage])

        def back() -> None:
            dy = self._gradients.pop(y)
            reads = [x.storage, y.storage, dy] if maximum else [dy]
            self._contribute(x, lambda dx: self._call("pool_backward", reads, [dx]))

        self._end(back)
        return y

    def respond(self, x: FeatureMap) -> FeatureMap:
        """Add local response normalization, whose backward reads input and output."""
        self._begin("lrn")
        y = self._map("y", x.channels, x.spatial)
        self._call("lrn", [x.storage], [y.storage])

        def back() -> None:
            dy = self._gradients.pop(y)
            self._contribute(x, lambda dx: self._call("lrn_backward", [x.storage, y.storage, dy], [dx]))

        self._end(back)
        return y

    def average(self, x: FeatureMap) -> FeatureMap:
        """Add pooling of whole maps."""
        return self.pool(x, x.spatial[0], 1, maximum=False)

    def add(self, x: FeatureMap, other: FeatureMap) -> FeatureMap:
        """Add a map to another one, which is overwritten: nothing else reads `x` afterwards."""
        self._begin("add")
        y = FeatureMap(x.storage, x.channels, x.spatial)
        self._call("add", [x.storage, other.storage], [x.storage])

        def back() -> None:
            dy = self._gradients.pop(y)
            self._gradients[x] = dy
            self._share(other, dy)

        self._end(back)
        return y

    def join(self, parts: Sequence[FeatureMap]) -> FeatureMap:
        """Join maps by their channels."""
        self._begin("concat")
        y = self._map("y", sum(part.channels for part in parts), parts[0].spatial)
        self._call("concat", [part.storage for part in parts], [y.storage])

        def back() -> None:
            dy = self._gradients.pop(y)
            for part in parts:
                self._contribute(part, lambda dx: self._call("slice", [dy], [dx]))

        self._end(back)
        return y

    def connect(self, x: FeatureMap, width: int) -> FeatureMap:
        """Add a fully connected layer."""
        self._begin("fc")
        y = self._map("y", width, ())
        weights, gradient = self._parameter(x.numbers * width)
        flops = 2 * x.numbers * width
        self._call("mm", [x.storage, weights], [y.storage], flops)

        def back() -> None:
            dy = self._gradients.pop(y)
            self._call("mm_backward", [x.storage, dy], [gradient], flops)
            self._contribute(x, lambda dx: self._call("mm_backward", [weights, dy], [dx], flops))
            self._update(weights, gradient, y)

        self._end(back)
        return y

    def drop(self, x: FeatureMap) -> FeatureMap:
        """Add dropout in place, with a mask of a byte for each number."""
        self._begin("dropout")
        y = FeatureMap(x.storage, x.channels, x.spatial)
        mask = self._storage("mask", Affine(0, x.numbers))
        self._call("dropout", [x.storage], [x.storage, mask])

        def back() -> None:
            self._contribute_in_place(x, self._gradients.pop(y), "dropout_backward", [mask])

        self._end(back)
        return y

    def step(self, logits: FeatureMap) -> StepGraph:
        """Return the step with a softmax loss of logits, and with backward, which updates the parameters."""
        self._begin("softmax")
        probabilities = self._map("y", logits.channels, ())
        self._call("softmax", [logits.storage], [probabilities.storage])
        self._phase = Phase.BACKWARD
        dy = self._storage("dlogits", Affine(0, logits.numbers * _BYTES))
        self._call("softmax_backward", [probabilities.storage], [dy])
        self._gradients[logits] = dy
        for back in reversed(self._backward):
            back()
        return self._made()

    def _made(self) -> StepGraph:
        return StepGraph(
            name=self._name,
            batch=1,
            operations=tuple(self._operations),
            storages=tuple(self._storages),
            recorded=(1, 2),
        )

    def _convolution(self, flops: int, **shape: Any) -> Callable[[Operation, Sequence[int], int], None]:
        """Return a function that adds a convolution's call, given what it reads and the storage that it writes."""

        def call(operation: Operation, reads: Sequence[int], written: int) -> None:
            problem = ConvolutionProblem(operation=operation, batch=1, **shape)
            self._call(f"convolution {operation.value}", reads, [written], flops, problem)

        return call

    def _update(self, weights: int, gradient: int, y: FeatureMap) -> None:
        """Update parameters at the end of a layer's backward, up to which the layer's output may stay."""
        state = []
        if self._rules.momentum:
            state = [self._storage("momentum", self._storages[weights].size, Role.OPTIMIZER_STATE)]
        held = y.storage if self._rules.outputs_held else None
        self._call("sgd", [weights, gradient, *state], [weights, *state], held=held)

    def _begin(self, kind: str) -> None:
        self._layers += 1
        self._layer = f"{kind}{self._layers}"

    def _end(self, back: Callable[[], None]) -> None:
        layer = self._layer

        def named() -> None:
            self._layer = layer
            back()

        self._backward.append(named)

    def _contribute(self, x: FeatureMap, write: Callable[[int], None]) -> None:
        """Let a call write a gradient map, and add it to the gradient that is there."""
        dx = self._storage("dx", Affine(0, x.numbers * _BYTES))
        write(dx)
        self._share(x, dx)

    def _contribute_in_place(self, x: FeatureMap, dy: int, kind: str, reads: Sequence[int]) -> None:
        """Let a call overwrite a gradient map, unless another map has it too."""
        if dy in self._gradients.values():
            self._contribute(x, lambda dx: self._call(kind, [*reads, dy], [dx]))
            return
        self._call(kind, [*reads, dy], [dy])
        self._share(x, dy)

    def _share(self, x: FeatureMap, dx: int) -> None:
        there = self._gradients.get(x)
        if there is None:
            self._gradients[x] = dx
        elif [*self._gradients.values()].count(there) == 1:
            self._call("add", [there, dx], [there])
        else:
            total = self._storage("dx", Affine(0, x.numbers * _BYTES))
            self._call("add", [there, dx], [total])
            self._gradients[x] = total

    def _map(self, name: str, channels: int, spatial: tuple[int, ...], role: Role = Role.ACTIVATION) -> FeatureMap:
        storage = self._storage(name, Affine(0, channels * prod(spatial) * _BYTES), role)
        return FeatureMap(storage, channels, spatial)

    def _parameter(self, numbers: int) -> tuple[int, int]:
        size = Affine(numbers * _BYTES)
        return self._storage("w", size, Role.PARAMETER), self._storage("dw", size)

    def _storage(self, name: str, size: Affine, role: Role = Role.ACTIVATION) -> int:
        number = len(self._storages)
        self._storages.append(Storage(name=f"{self._layer or 'step'}.{name}_{number}", role=role, size=size))
        return number

    def _call(
        self,
        kind: str,
        reads: Sequence[int],
        writes: Sequence[int],
        flops: int = 0,
        problem: ConvolutionProblem | None = None,
        held: int | None = None,
        views: Mapping[int, int] | None = None,
    ) -> None:
        """Add a call. `views` has the numbers of a sample that are read of a storage, where it is not read whole."""
        views = views or {}
        sizes = [
            Affine(0, views[each] * _BYTES) if each in views else self._storages[each].size
            for each in (*reads, *writes)
        ]
        traffic = Affine(sum(size.fixed for size in sizes), sum(size.per_sample for size in sizes))
        operation = StepOperation(
            name=f"{kind}_{len(self._operations)}",
            kind=f"cudnn.{kind.split()[0]}",
            phase=self._phase,
            dtype="float32",
            reads=tuple(sorted({*reads} | ({held} if held is not None else set()))),
            writes=tuple(sorted({*writes})),
            flops=Affine(0, flops),
            traffic=traffic,
            problem=problem,
            module=self._layer,
        )
        self._operations.append(operation)
