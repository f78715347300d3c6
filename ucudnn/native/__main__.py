"""`python -m ucudnn.native`: compiles the library and prints the flags for a C++ build, like pkg-config."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ucudnn.command_line import WholeWords
from ucudnn.errors import InvalidValueError, UcudnnError
from ucudnn.native.build import INCLUDE, build, compile_flags, default_folder, libpython, link_flags

_DESCRIPTION = "Print the flags for a C++ build with UcudnnHandle_t, the handle type that micro-batches convolutions."
_EPILOG = """\
In a program, one type changes:

    #include <ucudnn.hpp> // after cudnn.h or instead of it
    UcudnnHandle_t handle; // was: cudnnHandle_t handle;

Its build gets two lists of flags. The library is compiled at the first request:

    c++ $(python -m ucudnn.native --cflags) \\
        -I/usr/local/cuda/include -c program.cpp
    c++ program.o $(python -m ucudnn.native --libs) \\
        -lcudnn -L/usr/local/cuda/lib64 -lcudart -o program

The environment has the settings of a run, as for Python: UCUDNN_DEFAULT_WORKSPACE_LIMIT, which wins over limits that
the program states; UCUDNN_TOTAL_WORKSPACE_SIZE; UCUDNN_BATCH_SIZE_POLICY; UCUDNN_DATABASE; ... These are for C++ only:

UCUDNN_PYTHON: the Python that plans: an executable with ucudnn installed, or its libpython; default: the Python that
compiled the library.

UCUDNN_PLAIN: 1 uses plain cuDNN, for comparison.

UCUDNN_VERBOSE: 1 writes a line to stderr for each convolution that is planned.

UCUDNN_REPORT: file for a report of all convolutions when the process exits: JSON if its name ends in .json, else text;
- is stderr, and %p the number of the process.
"""
_DEFAULT = str(default_folder()).replace("%", "%%")  # argparse formats it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ucudnn.native",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=WholeWords,
    )
    parser.add_argument("--cflags", action="store_true", help="print flags for the compiler")
    parser.add_argument("--libs", action="store_true", help="compile the library, and print flags for the linker")
    parser.add_argument("--build", action="store_true", help="compile the library, and print its path")
    parser.add_argument("--include-dir", action="store_true", help="print the folder of ucudnn.hpp")
    parser.add_argument("--libpython", action="store_true", help="print this Python's shared library")
    parser.add_argument("--folder", type=Path, help=f"folder for the library ({_DEFAULT})")
    parser.add_argument(
        "--include", type=Path, action="append", default=[], metavar="DIR", help="folder with cudnn.h or CUDA's headers"
    )
    parser.add_argument("--compiler", help="C++17 compiler; default: c++, g++ or clang++")
    options = parser.parse_args(arguments)
    found: list[str] = []
    try:
        compiles = options.libs or options.build
        asked = compiles or options.cflags or options.include_dir or options.libpython
        used = {"--folder": compiles, "--compiler": compiles, "--include": compiles or options.cflags}
        for name, is_used in used.items():
            if asked and not is_used and getattr(options, name[2:]):
                also = " and --cflags" if name == "--include" else ""
                raise InvalidValueError(f"{name} is for --libs and --build{also}, not for what was asked for")
        if options.include_dir:
            found.append(str(INCLUDE))
        if options.cflags:
            found += compile_flags(options.include)
        if options.libs or options.build:
            folder = (options.folder or default_folder()).absolute()
            library = build(folder, options.include, options.compiler)
            found += link_flags(folder) if options.libs else [str(library)]
        if options.libpython:
            found.append(str(libpython() or ""))
    except UcudnnError as error:
        sys.stderr.write(f"ucudnn: {error}\n")
        return 2
    if not any((options.include_dir, options.cflags, options.libs, options.build, options.libpython)):
        parser.print_help()
        return 2
    sys.stdout.write(" ".join(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
