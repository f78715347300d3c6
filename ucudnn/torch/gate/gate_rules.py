"""The rules of the gate for the calls of a tuned program."""

from collections.abc import Callable, Mapping
from typing import Any

from ucudnn.torch.gate.call_gate import Compute, GateRule, look_of
from ucudnn.torch.tuning.tuned_call import TunedCall


def rules_of(
    calls: Mapping[tuple[Any, ...], TunedCall], unseen: tuple[Any, ...] = (), now: Callable[[], tuple[Any, ...]] = tuple
) -> list[GateRule]:
    """Return the rules for those calls of which a part is replaced.

    Args:
        calls: what becomes of calls, by their key.
        unseen: what a key must end with, because the gate does not see it.
        now: returns what that is at a call; where it is something else, PyTorch computes.
    """

    def checked(compute: Compute) -> Compute:
        return (lambda x, w, y: now() == unseen and compute(x, w, y)) if unseen else compute

    found = []
    for key, call in list(calls.items()):
        seen = len(key) - len(unseen)
        rule = call.rule(look_of(key[:seen]), checked) if key[seen:] == unseen and call.way is not None else None
        if rule is not None:
            found.append(rule)
    return found


def beginning(rules: list[GateRule], begins: Callable[[], object]) -> list[GateRule]:
    """Return rules of which the first one calls a function before it computes."""
    if not rules:
        return rules
    at, first = next(iter(rules[0].outputs.items()))

    def compute(x: int, w: int, y: int) -> bool:
        begins()
        return first.compute(x, w, y)

    return [rules[0]._replace(outputs={**rules[0].outputs, at: first._replace(compute=compute)}), *rules[1:]]
