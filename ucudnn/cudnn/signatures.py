"""Functions with the names and parameters of C's, made from rows of a table."""

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, TypeVar

Returned = TypeVar("Returned")


def named(name: str, parameters: str, body: Callable[..., Returned], doc: str) -> Callable[..., Returned]:
    """Return a function that does what another does, under a name and with parameters that may be keywords.

    Args:
        name: its name.
        parameters: names of its parameters, with blanks between them; the body takes them in this order.
        body: what it does.
        doc: its docstring.

    Returns:
        The function; `inspect.signature` and `help` know its parameters.
    """
    signature = Signature([Parameter(each, Parameter.POSITIONAL_OR_KEYWORD) for each in parameters.split()])
    count = len(signature.parameters)

    def call(*arguments: Any, **keywords: Any) -> Returned:
        if keywords or len(arguments) != count:
            try:
                arguments = signature.bind(*arguments, **keywords).args
            except TypeError as error:
                raise TypeError(f"{name}{signature}: {error}") from None
        return body(*arguments)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = doc
    vars(call)["__signature__"] = signature  # as functools.wraps leaves it for `inspect` to find
    return call
