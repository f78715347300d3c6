"""Functions with the names and parameters of C functions, made from declarations such as 'destroy(handle)'."""

import re
from collections.abc import Callable
from inspect import Parameter, Signature
from operator import index
from typing import Any, TypeVar

from ucudnn.backends.cudnn.api.declarations import DECLARATIONS
from ucudnn.cudnn.loading import library

Returned = TypeVar("Returned")

_RAISES = "\n\nRaises:\n    CudnnError: if cuDNN reports an error."


def named(declaration: str, body: Callable[..., Returned], doc: str) -> Callable[..., Returned]:
    """Return a function with a name, and with parameters that may be given by keyword.

    Args:
        declaration: its name, and in brackets the names of its parameters, separated by blanks.
        body: called with the arguments in the order of the parameters.
        doc: docstring of the function.

    Returns:
        The function; `inspect.signature` and `help` show its parameters.
    """
    name, *parameters = re.findall(r"\w+", declaration)
    signature = Signature([Parameter(each, Parameter.POSITIONAL_OR_KEYWORD) for each in parameters])
    count = len(parameters)

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


def c_name(name: str) -> str:
    """Return the name of cuDNN's function behind one of CuPy's, whose name may end in the version that changed it."""
    return "cudnn" + name[0].upper() + re.sub(r"_v\d$", "", name[1:])


def calls(declaration: str, summary: str, function: str = "") -> Callable[..., Any]:
    """Return a function that calls cuDNN's, which `c_name` tells unless it is given; integers may be NumPy's.

    The summary begins its docstring, which also names cuDNN's function.
    """
    name, *parameters = re.findall(r"\w+", declaration)
    function = function or c_name(name)
    inputs = [letter for letter in DECLARATIONS[function] if letter.islower()]
    if len(inputs) != len(parameters):
        raise AssertionError(f"{declaration} does not take {inputs} as {function}")
    casts = [float if letter in "fd" else index for letter in inputs]

    def body(*arguments: Any) -> Any:
        return library().call(function, *[cast(each) for cast, each in zip(casts, arguments, strict=True)])

    return named(declaration, body, f"{summary} ({function}).{_RAISES}")
