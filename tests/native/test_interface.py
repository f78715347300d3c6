"""The header, the structures that C++ and Python share, Python processes, and `python -m ucudnn.native`."""

import ctypes
import subprocess
from threading import Event, RLock
from time import sleep

import pytest

from tests.support.paths import NATIVE
from tests.support.problems import make_problem
from ucudnn.backends.cudnn.algorithms import compile_ahead
from ucudnn.errors import BackendUnavailableError
from ucudnn.native import bridge, build
from ucudnn.native.__main__ import main
from ucudnn.native.registry import groups_apart


@pytest.mark.parametrize("standard", ["c++11", "c++17", "c++20"])
def test_the_header_compiles_against_cudnns(toolchain, tmp_path, standard):
    strict = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror", "-c"]
    toolchain.compile(NATIVE / "header.cpp", tmp_path / "program.o", f"-std={standard}", *strict)


def test_the_header_itself_names_nothing_deprecated(toolchain, tmp_path):
    (tmp_path / "program.cpp").write_text("#define CUDNN_WARN_DEPRECATED\n#include <ucudnn.hpp>\n")
    toolchain.compile(tmp_path / "program.cpp", tmp_path / "program.o", "-Wall", "-Werror", "-c")


def test_two_parts_of_a_program_include_the_header(toolchain, libraries, process, tmp_path):
    (tmp_path / "one.cpp").write_text("#include <ucudnn.hpp>\nint two(); int main() { return two(); }\n")
    (tmp_path / "two.cpp").write_text("#include <ucudnn.hpp>\nint two() { return UcudnnHandle_t() != nullptr; }\n")
    links = [str(tmp_path / "two.cpp"), f"-L{libraries}", "-lucudnn", "-l:libcudnn.so.9"]
    program = toolchain.compile(tmp_path / "one.cpp", tmp_path / "program", *links)
    assert process([program]).returncode == 0


def test_the_c_interface_compiles_as_c(toolchain, tmp_path):
    (tmp_path / "program.c").write_text("#include <ucudnn_c.h>\nint main(void) { return ucudnn_divides(0, 0, 0); }\n")
    includes = [f"-I{build.INCLUDE}", *(f"-isystem{each}" for each in toolchain.headers)]
    command = ["gcc", "-std=c11", "-Wall", "-Werror", "-c", *includes, "program.c", "-o", "program.o"]
    subprocess.run(command, cwd=tmp_path, check=True)


def test_structures_have_the_same_layout_in_cpp_and_python(toolchain, tmp_path):
    program = toolchain.compile(NATIVE / "layout.cpp", tmp_path / "layout", f"-I{build.SOURCES}")
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    told = {}
    for structure, name, offset, size in map(str.split, lines):
        told.setdefault(structure, {})[name] = int(offset), int(size)
    assert told.pop("version")["-"] == (bridge.VERSION, 0)
    assert set(told) == {"Question", "Step", "Request", "Answer", "Callbacks"}
    for structure, fields in told.items():
        ours = getattr(bridge, f"{structure}Struct")
        assert fields.pop("-") == (0, ctypes.sizeof(ours))
        assert fields == {name: (getattr(ours, name).offset, getattr(ours, name).size) for name, _ in ours._fields_}


def test_a_library_of_another_version_is_refused():
    table = bridge.CallbacksStruct(version=bridge.VERSION + 1)
    with pytest.raises(
        BackendUnavailableError, match=r"version 3, this package 2: run `python -m ucudnn.native --build`"
    ):
        bridge.attach(ctypes.addressof(table))


def test_an_exception_that_ends_a_plan_is_a_failure(capsys):
    # C++ takes 0 for success, and ctypes returns 0 if a callback raises.
    own = bridge.Bridge.__new__(bridge.Bridge)
    own._lock, own._texts, own._refused = RLock(), {}, {}
    answer = bridge.AnswerStruct()

    def body():
        raise KeyboardInterrupt

    assert own._guarded(1, ctypes.pointer(answer), body) == 1
    assert answer.text == b"KeyboardInterrupt:"
    assert own._refused == {"KeyboardInterrupt:": 1}


def test_the_end_of_a_process_waits_for_threads(monkeypatch):
    monkeypatch.setattr(compile_ahead, "exchange_capture_mode", int)
    own = compile_ahead.AheadCompiler(None, None)
    started, ended = Event(), Event()

    def work():
        started.set()
        sleep(0.05)
        ended.set()

    for name in ("_listing", "_building"):
        started.clear(), ended.clear()
        getattr(own, name).submit(work)
        started.wait()
        own.stop()
        assert ended.is_set()
    own.stop()  # nothing is left


@pytest.mark.parametrize("ahead_ms", [0, 5, 20, 60])
def test_a_thread_with_pythons_lock_makes_its_handle_while_another_thread_connects(computes_in_python, ahead_ms):
    computes_in_python("in_two_threads", str(ahead_ms))  # else it hangs


def test_the_library_is_compiled_once(libraries, toolchain, capsys):
    before = (libraries / build.LIBRARY).stat().st_mtime_ns
    given = [f"--include={folder}" for folder in toolchain.headers]
    assert main(["--build", "--libs", "--cflags", "--folder", str(libraries), *given]) == 0
    assert (libraries / build.LIBRARY).stat().st_mtime_ns == before
    printed = capsys.readouterr().out
    assert f"-I{build.INCLUDE}" in printed
    assert "-lucudnn" in printed


def test_a_missing_compiler_is_named(toolchain, tmp_path, capsys):
    assert main(["--build", "--folder", str(tmp_path), "--compiler", "/nowhere/c++"]) == 2
    assert "/nowhere/c++ cannot be run" in capsys.readouterr().err


def test_a_compiler_that_fails_says_why(toolchain, tmp_path, monkeypatch):
    (tmp_path / "wrong.cpp").write_text("#error wrong sources\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(BackendUnavailableError, match="wrong sources"):
        build.build(tmp_path / "out", toolchain.headers)


def test_missing_headers_are_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(build, "_CUDNN", (("no_such_header.h",), "no_such_package", ()))
    assert main(["--build", "--folder", str(tmp_path)]) == 2
    assert "no_such_header.h was not found: give its folder with --include" in capsys.readouterr().err


def test_a_folder_without_the_headers_that_others_include_is_passed_over(monkeypatch, tmp_path):
    cudnn, partial, whole, apart = (tmp_path / name for name in ("cudnn", "partial", "whole", "apart"))
    for file in (cudnn / "cudnn.h", partial / "cuda_runtime_api.h", whole / "cuda_runtime_api.h"):
        file.parent.mkdir()
        file.write_text("")
    for folder in (whole, apart):  # the wheel without that of crt/ is partial
        (folder / "crt").mkdir(parents=True)
        (folder / "crt" / "host_defines.h").write_text("")
    monkeypatch.setattr(build, "wheel_folders", lambda package, kind: [cudnn if package == "cudnn" else partial])
    monkeypatch.setattr(build, "_toolkits", lambda: [whole])
    for name in ("_CUDNN", "_CUDA", "_OLDER_CUDA"):
        headers, package, _ = getattr(build, name)
        monkeypatch.setattr(build, name, (headers, package, ()))
    assert build.header_folders() == [cudnn, whole]
    monkeypatch.setattr(build, "_toolkits", list)
    with pytest.raises(BackendUnavailableError, match=rf"{partial} has cuda_runtime_api.h, but not crt/host_defines.h"):
        build.header_folders()
    assert build.header_folders([partial, whole]) == [partial, whole, cudnn]
    assert build.header_folders([partial, apart]) == [partial, apart, cudnn]


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (["--cflags", "--folder", "somewhere"], "--folder"),
        (["--cflags", "--compiler", "g++"], "--compiler"),
        (["--include-dir", "--include", "somewhere"], "--include"),
        (["--libpython", "--folder", "somewhere"], "--folder"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(arguments, refused, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"ucudnn: {refused} is for --libs and --build")


@pytest.mark.parametrize("columns", [80, 60])
def test_help_shows_how_to_build_a_program_and_is_no_wider_than_the_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([]) == 2
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= columns
    for word in ("#include <ucudnn.hpp>", "UcudnnHandle_t", "--cflags", "--libs", "UCUDNN_PYTHON", "UCUDNN_PLAIN"):
        assert word in printed


def test_the_header_and_libpython_are_found(capsys):
    assert (build.INCLUDE / "ucudnn.hpp").exists()
    for option, path in (("--include-dir", build.INCLUDE), ("--libpython", build.libpython() or "")):
        assert main([option]) == 0
        assert capsys.readouterr().out.strip() == str(path)


@pytest.mark.parametrize(
    ("x_stride", "y_stride", "groups"), [(0, 0, 1), (2, 2, 2), (3, 3, 3), (2, 1, 1), (1.5, 1.5, 1)]
)
def test_strides_tell_the_number_of_groups(x_stride, y_stride, groups):
    plain = make_problem()
    strides = {"x_batch_stride": int(x_stride * plain.x_sample), "y_batch_stride": int(y_stride * plain.y_sample)}
    assert groups_apart(make_problem(**strides)) == groups
