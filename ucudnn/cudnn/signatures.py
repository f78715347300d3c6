"""Functions with the names and parameters of C functions, made from rows of a table."""

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, TypeVar

Returned = TypeVar("Returned")


def named(name: str, parameters: str, body: Callable[..., Returned], doc: str) -> Callable[..., Returned]:
    """Return a function with a name, and with parameters that may be given by keyword.

    Args:
        name: name of the function.
        parameters: names of its parameters, separated by blanks.
        body: called with the arguments in the order of the parameters.
        doc: docstring of the function.

    Returns:
        The function; `inspect.signature` and `help` show its parameters.
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
    vars(call)["__signature__"] = signature  # where `inspect` looks for it
    return call
