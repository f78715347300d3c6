"""Additive attention that keeps no intermediate result (Meng et al., section 3.2.1; Bahdanau et al., 2015).

The score of a decoder step is v · tanh(W q + U m) for each position of the memory, where m is the encoder's output.
With autograd's operators, the tanh of every decoder step stays until backward: T x S x B x H numbers for T decoder
steps, S positions, a mini-batch of B and a hidden size of H. Here neither the sum nor its tanh stays. Backward computes
both again, decoder step by decoder step, so that only one step's exist at a time.

This module needs PyTorch; `ucudnn.memory` and its other modules do not.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ucudnn.errors import InvalidValueError

__all__ = ["AdditiveAttention"]


@final
class AdditiveAttention(nn.Module):
    """Additive attention whose memory grows with T + S instead of T x S, but for the scores themselves.

    Outputs and gradients are those of a layer that computes the score of one decoder step after the other with
    PyTorch's operators, to the bit. A decoder that needs the context of a step before it knows the next query calls the
    layer for each step, and passes the `keys` of the memory, which it computes once.

    Args:
        query_size: numbers of a query.
        memory_size: numbers of a position of the memory.
        hidden_size: H.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        query: W, without a bias.
        key: U, with the bias of the sum.
        score: v, of H numbers.
    """

    def __init__(
        self,
        query_size: int,
        memory_size: int,
        hidden_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.query = nn.Linear(query_size, hidden_size, bias=False, device=device, dtype=dtype)
        self.key = nn.Linear(memory_size, hidden_size, device=device, dtype=dtype)
        self.score = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        bound = 1 / sqrt(hidden_size)
        nn.init.uniform_(self.score, -bound, bound)

    def keys(self, memory: Tensor) -> Tensor:
        """Return U m of a memory (B x S x memory_size), as B x S x H: what all decoder steps share."""
        projected: Tensor = self.key(memory)
        return projected

    def forward(
        self, query: Tensor, memory: Tensor, *, padding: Tensor | None = None, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what each decoder step reads from the memory, and how much from each position.

        Args:
            query: B x T x query_size; T is 1 for a decoder that works step by step.
            memory: B x S x memory_size.
            padding: B x S, true at positions that no step may read; at least one position of each sample is false.
            keys: `keys(memory)`, where it is there already.

        Returns:
            The context (B x T x memory_size) and the weights (B x T x S), which are the softmax of the scores.

        Raises:
            InvalidValueError: if the shapes do not belong together.
        """
        keys = self.keys(memory) if keys is None else keys
        self._check(query, memory, padding, keys)
        scores: Tensor = _AdditiveScores.apply(self.query(query), keys, self.score)  # type: ignore[no-untyped-call]
        if padding is not None:
            scores = scores.masked_fill(padding.unsqueeze(1), float("-inf"))
        weights = torch.softmax(scores, -1)
        return torch.matmul(weights, memory), weights

    def _check(self, query: Tensor, memory: Tensor, padding: Tensor | None, keys: Tensor) -> None:
        batch, positions = (*memory.shape, 0, 0)[:2]
        steps = query.shape[1] if query.dim() > 1 else 0
        shapes: list[tuple[str, Tensor, tuple[int, ...]]] = [
            ("memory", memory, (batch, positions, self.key.in_features)),
            ("query", query, (batch, steps, self.query.in_features)),
            ("keys", keys, (batch, positions, self.key.out_features)),
        ]
        shapes += [] if padding is None else [("padding", padding, (batch, positions))]
        for name, tensor, needed in shapes:
            if tensor.shape != needed:
                raise InvalidValueError(f"{name} is {_text(tensor.shape)}, and {_text(needed)} is needed")


class _AdditiveScores(torch.autograd.Function):
    """Scores (B x T x S) of projected queries (B x T x H), keys (B x S x H) and v (H)."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, score: Tensor) -> Tensor:
        ctx.save_for_backward(queries, keys, score)
        scores = keys.new_empty((queries.shape[0], queries.shape[1], keys.shape[1]))
        vector = score.to(keys.dtype)  # under autocast, products are of its type
        for step in range(queries.shape[1]):
            scores[:, step] = torch.matmul(_tanh_of_sum(queries, keys, step), vector)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        queries, keys, score = ctx.saved_tensors
        vector = score.to(keys.dtype)
        of_queries = torch.empty_like(queries)
        of_keys: Tensor | None = None
        of_score: Tensor | None = None
        # From the last step to the first: in this order autograd adds up the gradients of a step-by-step layer.
        for step in reversed(range(queries.shape[1])):
            tanh = _tanh_of_sum(queries, keys, step)
            rows = gradient[:, step].reshape(-1)
            part = tanh.flatten(0, 1).t().mv(rows)
            of_score = part if of_score is None else of_score.add_(part)
            of_sum = torch.outer(rows, vector).view_as(tanh)
            torch.ops.aten.tanh_backward.grad_input(of_sum, tanh, grad_input=of_sum)
            of_queries[:, step] = of_sum.sum(1)
            of_keys = of_sum if of_keys is None else of_keys.add_(of_sum)
        return of_queries, of_keys, None if of_score is None else of_score.to(score.dtype)


def _tanh_of_sum(queries: Tensor, keys: Tensor, step: int) -> Tensor:
    """Return tanh(W q + U m) of one decoder step (B x S x H), in memory of its own."""
    return torch.add(keys, queries[:, step].unsqueeze(1)).tanh_().contiguous()


def _text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a number"
