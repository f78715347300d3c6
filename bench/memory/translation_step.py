"""Steps of translators (NMT), written down operator by operator: LSTM cells, and additive attention.

A step of 400 time steps has 80,000 operators, which take long to trace. What is written here is what PyTorch traces of
`bench.memory.translator`, but for views and for what is as small as a score; tests compare both. Nothing
updates parameters, as in TensorFlow's tutorial, whose gradient descent has no state. Gradients of embeddings are dense.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.memory.layer_step import LayerRules, LayerStep
from ucudnn.memory.step.graph import Affine, Phase, Role, StepGraph

WIDTH, LAYERS, WORDS, CLASSES = 1024, 3, 40_000, 512
"""Of TensorFlow's tutorial: size of states, layers, vocabulary, and the words that its sampled loss compares."""

_BYTES = 4  # of a float32


class TranslatorSizes(NamedTuple):
    """Sizes of a translator: time steps of each language, layers of the encoder and of the decoder, and widths."""

    steps: int
    layers: int = LAYERS
    width: int = WIDTH
    words: int = WORDS
    classes: int = CLASSES


class _Matrix(NamedTuple):
    """A parameter of a product, its gradient, and the sizes of the product's rows."""

    weights: int
    gradient: int
    entering: int
    leaving: int


class _Cell(NamedTuple):
    """What a cell keeps: joined input and state, gates, candidate, the cell's state before, and tanh of that after."""

    joined: int
    gates: int
    candidate: int
    before: int
    bounded: int


class _Recurrence(NamedTuple):
    """What LSTM layers keep: the table of words, products by layer, and cells by time step and layer."""

    table: _Matrix
    products: list[_Matrix]
    cells: list[list[_Cell]]


class _Scores(NamedTuple):
    """What scores keep: the vector, and the tanh of each time step; keys and queries where it is computed again."""

    vector: _Matrix
    tanhs: list[int]
    keys: int
    queries: int


_State = tuple[list[int], list[int]]
"""Outputs and states of cells, by layer."""


def translator_step(sizes: TranslatorSizes, *, again: bool) -> StepGraph:
    """Return the step of a translator at a mini-batch of 1; `again` says whether scores are computed again."""
    return _TranslatorStep(sizes, again=again).graph()


class _TranslatorStep(LayerStep):
    """Writes the step down. Sizes are in numbers of one sample."""

    def __init__(self, sizes: TranslatorSizes, *, again: bool) -> None:
        super().__init__("translator", LayerRules(), 2, sizes.steps, 2)  # tokens have eight bytes
        self.sizes, self.again = sizes, again
        self.whole = sizes.steps * sizes.width
        self.written: set[int] = set()  # gradients of parameters that are there

    def graph(self) -> StepGraph:
        """Return the step."""
        steps, width, whole, classes = self.sizes.steps, self.sizes.width, self.whole, self.sizes.classes
        zeros = [self._op("zeros", [], width) for _ in range(self.sizes.layers)]
        source, memory, state = self._recur("encoder", (zeros, zeros))
        target, queries, _ = self._recur("decoder", state)
        self._layer = "attention"
        to_keys, to_asked = self._matrix(width, width), self._matrix(width, width)
        scores, kept = self._scores(self._times(memory, to_keys), self._times(queries, to_asked))
        weights = self._op("softmax", [scores], steps**2)
        context = self._op("bmm", [weights, memory], whole, 2 * steps * whole)
        self._layer = "head"
        narrow, head = self._matrix(2 * width, width), self._matrix(width, classes)
        joined = self._op("cat", [context, queries], 2 * whole)
        bounded = self._op("tanh", [self._times(joined, narrow)], whole)
        chances = self._op("log_softmax", [self._times(bounded, head)], steps * classes)
        self._phase = Phase.BACKWARD
        down = self._back(self._op("log_softmax_backward", [chances], steps * classes), bounded, head)
        down = self._back(self._op("tanh_backward", [down, bounded], whole), joined, narrow)
        self._layer = "attention"
        of_weights = self._op("bmm", [down, memory], steps**2, 2 * steps * whole, {down: whole})
        of_memory = self._op("bmm", [weights, down], whole, 2 * steps * whole, {down: whole})
        of_keys, of_asked = self._scores_back(self._op("softmax_backward", [of_weights, weights], steps**2), kept)
        of_queries = self._op("add", [down, self._back(of_asked, queries, to_asked)], whole, 0, {down: whole})
        self._add(of_memory, self._back(of_keys, memory, to_keys))
        carried = self._recur_back("decoder", target, of_queries, None)
        self._recur_back("encoder", source, of_memory, carried)
        return self._made()

    def _recur(self, name: str, state: _State) -> tuple[_Recurrence, int, _State]:
        """Add an embedding and LSTM layers; return what they keep, all outputs, and the last state."""
        width, (hidden, cells) = self.sizes.width, ([*each] for each in state)
        self._layer = name
        table = self._matrix(self.sizes.words, width)
        products = [self._matrix(2 * width, 4 * width) for _ in range(self.sizes.layers)]
        x = self._op("embedding", [self.image.storage, table.weights], self.whole, 0, {table.weights: self.whole})
        made: list[list[_Cell]] = []
        outputs = []
        for _ in range(self.sizes.steps):
            below, row = x, []
            for layer, product in enumerate(products):
                cell, below, cells[layer] = self._cell(below, hidden[layer], cells[layer], product)
                hidden[layer] = below
                row.append(cell)
            made.append(row)
            outputs.append(below)
        return _Recurrence(table, products, made), self._op("stack", outputs, self.whole), (hidden, cells)

    def _cell(self, x: int, hidden: int, state: int, product: _Matrix) -> tuple[_Cell, int, int]:
        """Add a cell; return what it keeps, its output and its state."""
        width = self.sizes.width
        joined = self._op("cat", [x, hidden], 2 * width, 0, {x: width})
        raw = self._times(joined, product)
        gates = self._op("sigmoid", [raw], 3 * width, 0, {raw: 3 * width})
        candidate = self._op("tanh", [raw], width, 0, {raw: width})
        forgotten = self._op("mul", [gates, state], width, 0, {gates: width})
        entered = self._op("mul", [gates, candidate], width, 0, {gates: width})
        after = self._op("add", [forgotten, entered], width)
        bounded = self._op("tanh", [after], width)
        return (
            _Cell(joined, gates, candidate, state, bounded),
            self._op("mul", [gates, bounded], width, 0, {gates: width}),
            after,
        )

    def _recur_back(self, name: str, made: _Recurrence, down: int, carried: _State | None) -> _State:
        """Add the backward of LSTM layers and of their embedding; return the gradients of the first state.

        `down` is the gradient of all outputs, and `carried` those of the last state.
        """
        self._layer = name
        layers = self.sizes.layers
        hidden: list[int | None] = [*carried[0]] if carried else [None] * layers
        states: list[int | None] = [*carried[1]] if carried else [None] * layers
        entered = []
        for row in reversed(made.cells):
            above = down
            for layer in reversed(range(layers)):
                parts = [above, *(each for each in [hidden[layer]] if each is not None)]
                above, states[layer] = self._cell_back(row[layer], parts, states[layer], made.products[layer])
                hidden[layer] = above
            entered.append(above)
        views = dict.fromkeys(entered, self.sizes.width)
        of_words = self._op("stack", entered, self.whole, 0, views)
        self._call("embedding_backward", [of_words], [made.table.gradient])
        return [each for each in hidden if each is not None], [each for each in states if each is not None]

    def _cell_back(self, cell: _Cell, parts: Sequence[int], state: int | None, product: _Matrix) -> tuple[int, int]:
        """Add the backward of a cell; return the gradients of its joined input and of the state before it.

        `parts` are the gradients of its output, of which each is a part of a larger storage.
        """
        width, gates = self.sizes.width, cell.gates
        views = {gates: width, **dict.fromkeys(parts, width)}
        down = self._op("add", parts, width, 0, views) if len(parts) > 1 else parts[0]
        of_output = self._op("mul", [down, cell.bounded], width, 0, views)
        of_bounded = self._op("mul", [down, gates], width, 0, views)
        of_state = self._op("tanh_backward", [of_bounded, cell.bounded], width)
        if state is not None:
            self._add(of_state, state)
        of_gates = [
            self._op("mul", [of_state, cell.candidate], width),
            self._op("mul", [of_state, cell.before], width),
            of_output,
        ]
        before = self._op("mul", [of_state, gates], width, 0, views)
        of_candidate = self._op("mul", [of_state, gates], width, 0, views)
        sigmoid = self._op("sigmoid_backward", [self._op("cat", of_gates, 3 * width), gates], 3 * width)
        tanh = self._op("tanh_backward", [of_candidate, cell.candidate], width)
        raw, other = (self._op("slice_backward", [each], 4 * width) for each in (sigmoid, tanh))
        self._add(raw, other)
        return self._back(raw, cell.joined, product), before

    def _scores(self, keys: int, queries: int) -> tuple[int, _Scores]:
        """Add the scores of all time steps; return them, and what they keep."""
        vector = self._matrix(self.sizes.width, 1)
        found, tanhs = [], []
        for _ in range(self.sizes.steps):
            tanhs.append(self._tanh_of_sum(keys, queries))
            found.append(self._op("mv", [tanhs[-1], vector.weights], self.sizes.steps, 2 * self.whole))
        return self._op("stack", found, self.sizes.steps**2), _Scores(vector, tanhs, keys, queries)

    def _tanh_of_sum(self, keys: int, queries: int) -> int:
        summed = self._op("add", [keys, queries], self.whole, 0, {queries: self.sizes.width})
        if not self.again:
            return self._op("tanh", [summed], self.whole)
        self._call("tanh_", [summed], [summed])
        return summed

    def _scores_back(self, of_scores: int, kept: _Scores) -> tuple[int, int]:
        """Add the backward of scores, from the last time step to the first; return gradients of keys and queries."""
        steps, width = self.sizes.steps, self.sizes.width
        of_keys: int | None = None
        of_queries = []
        for tanh in reversed(kept.tanhs):
            there = self._tanh_of_sum(kept.keys, kept.queries) if self.again else tanh
            self._gather(kept.vector, [there, of_scores], 2 * self.whole, {of_scores: steps})
            outer = self._op("outer", [of_scores, kept.vector.weights], self.whole, 0, {of_scores: steps})
            of_sum = outer
            if self.again:
                self._call("tanh_backward_", [outer, there], [outer])
            else:
                of_sum = self._op("tanh_backward", [outer, there], self.whole)
            of_queries.append(self._op("sum", [of_sum], width))
            if of_keys is None:
                of_keys = of_sum
            else:
                self._add(of_keys, of_sum)
        assert of_keys is not None
        return of_keys, self._op("stack", of_queries, self.whole)

    def _matrix(self, entering: int, leaving: int) -> _Matrix:
        size = Affine(_BYTES * entering * leaving)
        weights, gradient = (self._storage(role.value, size, role) for role in (Role.PARAMETER, Role.GRADIENT))
        return _Matrix(weights, gradient, entering, leaving)

    def _times(self, x: int, matrix: _Matrix) -> int:
        """Add a product of all rows of a storage."""
        rows = self._storages[x].size.per_sample // (_BYTES * matrix.entering)
        flops = 2 * rows * matrix.entering * matrix.leaving
        return self._op("addmm", [x, matrix.weights], rows * matrix.leaving, flops)

    def _back(self, down: int, x: int, matrix: _Matrix) -> int:
        """Add the backward of a product; return the gradient of its input."""
        rows = self._storages[x].size.per_sample // (_BYTES * matrix.entering)
        flops = 2 * rows * matrix.entering * matrix.leaving
        self._gather(matrix, [x, down], flops, {})
        return self._op("mm", [down, matrix.weights], rows * matrix.entering, flops)

    def _gather(self, matrix: _Matrix, reads: Sequence[int], flops: int, views: Mapping[int, int]) -> None:
        """Add a part of a parameter's gradient: the first one is the gradient, others are added to it."""
        if matrix.gradient not in self.written:
            self.written.add(matrix.gradient)
            self._call("mm", reads, [matrix.gradient], flops, views=views)
            return
        part = self._storage("part", Affine(_BYTES * matrix.entering * matrix.leaving))
        self._call("mm", reads, [part], flops, views=views)
        self._add(matrix.gradient, part)

    def _add(self, to: int, more: int) -> None:
        self._call("add_", [to, more], [to])

    def _op(
        self, kind: str, reads: Sequence[int], numbers: int, flops: int = 0, views: Mapping[int, int] | None = None
    ) -> int:
        """Add an operator that makes a storage."""
        made = self._storage(kind, Affine(0, numbers * _BYTES))
        self._call(kind, reads, [made], flops, views=views)
        return made
