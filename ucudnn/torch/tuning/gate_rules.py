"""The rules of the gate for the calls of a tuned program."""

from collections.abc import Callable, Mapping
from typing import Any

from ucudnn.torch.gate.call_gate import GateRule, look_of
from ucudnn.torch.tuning.tuned_call import TunedCall


def rules_of(calls: Mapping[tuple[Any, ...], TunedCall]) -> list[GateRule]:
    """Return the rules for those calls of which a part is replaced.

    Args:
        calls: what becomes of calls, by their key.
    """
    rules = (call.rule(look_of(key)) for key, call in list(calls.items()) if call.way is not None)
    return [rule for rule in rules if rule is not None]


def tried_rules(calls: Mapping[tuple[Any, ...], TunedCall]) -> list[GateRule]:
    """Return rules that compute nothing, and let only calls come to Python in which something is tried in this step.

    Args:
        calls: what becomes of calls, by their key.
    """
    return [GateRule(look_of(key), {}, aside=call.aside) for key, call in list(calls.items()) if not call.reason]


def beginning(rules: list[GateRule], begins: Callable[[], object]) -> list[GateRule]:
    """Return rules of which the first one calls a function before it computes."""
    if not rules:
        return rules
    at, first = next(iter(rules[0].outputs.items()))

    def compute(*addresses: int) -> bool:
        begins()
        return first.compute(*addresses)

    return [
        rules[0]._replace(outputs={**rules[0].outputs, at: first._replace(compute=compute, direct=None)}),
        *rules[1:],
    ]
