"""Threads of NumPy's BLAS, so that they do not wait for processors that other threads of the process keep busy.

OpenBLAS divides each product among its threads and waits until the last of them is done. Where another library, such as
PyTorch, has threads of its own that wait actively, a thread of OpenBLAS gets no processor for a time slice of the
system, and products of microseconds take milliseconds.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

_PREFIXES = ("scipy_openblas", "openblas")
_SUFFIXES = ("64_", "")


@contextmanager
def blas_threads(count: int | None) -> Iterator[None]:
    """Let NumPy's BLAS use so many threads inside the context, in the whole process.

    Args:
        count: the number of threads; None changes nothing. Nothing is changed either where NumPy has another BLAS than
            the OpenBLAS that its wheels bring.
    """
    functions = None if count is None else _functions()
    if functions is None:
        yield
        return
    get, put = functions
    before = get()
    put(count)
    try:
        yield
    finally:
        put(before)


@cache
def _functions() -> tuple[Any, Any] | None:
    """Return the functions of NumPy's OpenBLAS that return and set its number of threads."""
    folder = Path(np.__file__).parent
    for path in sorted([*folder.parent.glob("numpy.libs/*openblas*"), *folder.glob(".dylibs/*openblas*")]):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        for prefix in _PREFIXES:
            for suffix in _SUFFIXES:
                get = getattr(library, f"{prefix}_get_num_threads{suffix}", None)
                put = getattr(library, f"{prefix}_set_num_threads{suffix}", None)
                if get is not None and put is not None:
                    get.restype, put.argtypes, put.restype = ctypes.c_int, [ctypes.c_int], None
                    return get, put
    return None
