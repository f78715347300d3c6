"""Tests that hold the structure: imports one way, names, values, and who may import what."""

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import ucudnn
from ucudnn import errors
from ucudnn.settings import VARIABLES, Settings

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ucudnn"

LAYERS = [  # lowest first; every module of the package is named exactly once
    {"errors", "lookahead"},
    {"units", "problem", "policy"},
    {"slabs", "backends.ahead", "backends.measurement"},
    {"configuration"},
    {"kernel", "inception", "densenet", "layers", "settings", "profile", "backends.base", "backends.candidates"},
    {
        "networks",
        "concurrency",
        "locks",
        "tensors",
        "results",
        "tails",
        "backends.sampling",
        "solvers.desirable",
        "solvers.reuse",
        "solvers.tails",
        "solvers.relaxation",
        "solvers.slabs",
    },
    {"backends.replay", "backends.cpu.*", "backends.cudnn.*", "solvers.bounding", "solvers.bundles", "solvers.program"},
    {"backends", "solvers.division", "solvers", "search", "plan", "workspace", "variants"},
    {"slab_search", "rounds"},
    {"requests", "allotment"},
    {"prospects", "shares"},
    {"exploration"},
    {"benchmark", "database", "turns"},
    {"decision", "measurements", "workers"},
    {"sharing"},
    {"store", "recording"},
    {"measuring"},
    {"report", "dispatch"},
    {"execution", "launcher"},
    {"handle", "console", "options", "plots.*"},
    {"plot_commands"},
    {"__init__", "cudnn.*", "torch.*"},
    {"models"},
    {"cli"},
    {"native.*", "__main__"},
]
PACKAGES = ("backends.cpu", "backends.cudnn", "cudnn", "native", "plots", "torch")
TORCH = {  # all of the package for PyTorch but its command line
    "torch",
    *(
        f"torch.{name}"
        for name in ("device", "kernels", "lanes", "lending", "names", "opening", "problems", "raw", "routes", "stock")
    ),
    *(f"torch.{name}" for name in ("summary", "switch", "timing")),
}
ONE_MODULE = {  # a third-party package is imported in one module only
    "pulp": {"solvers.program"},
    "typer": {"cli", "options", "plot_commands"},
    "rich": {"console"},
    "matplotlib": {"plots", "plots.bars", "plots.looks", "plots.points"},
    "torch": TORCH,
    "ctypes": {"backends.cudnn.driver", "backends.cudnn.library", "native.bridge"},
    "cupy": {"backends.cudnn.device"},
    "sqlite3": {"database"},
    "platformdirs": {"store"},
}


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1]) if parts[-1] == "__init__" and len(parts) > 1 else ".".join(parts)


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


def rank(name):
    for level, layer in enumerate(LAYERS):
        if name in layer or any(entry.endswith(".*") and f"{name}.".startswith(entry[:-1]) for entry in layer):
            return level
    raise AssertionError(f"add {name} to LAYERS")


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: write absolute imports, so that this test sees them"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(name):
    for module in imported_modules(MODULES[name]):
        if module.split(".")[0] == "ucudnn":
            target = module.removeprefix("ucudnn").lstrip(".") or "__init__"
            if target in MODULES:
                yield target


def test_the_search_for_modules_found_them():
    assert {"problem", "handle", "cli", "backends.replay", "solvers.division"} <= set(MODULES)


def one_package(name, target):
    """Return whether two modules are of one of the packages that are a layer of their own."""
    return any(name.startswith(package) and target.startswith(package) for package in PACKAGES)


def test_imports_flow_one_way():
    wrong = [
        f"{name} (layer {rank(name)}) imports {target} (layer {rank(target)})"
        for name in MODULES
        for target in own_imports(name)
        if rank(target) >= rank(name) and not one_package(name, target)
    ]
    assert wrong == []


def test_there_are_no_circles():
    done, path = set(), []

    def visit(name):
        assert name not in path, f"circle: {' -> '.join([*path[path.index(name) :], name])}"
        if name not in done:
            path.append(name)
            for target in own_imports(name):
                visit(target)
            done.add(path.pop())

    for name in MODULES:
        visit(name)


def test_backends_and_solvers_know_nothing_above_them():
    for name in MODULES:
        if name.startswith("solvers."):
            allowed = {"configuration", "errors", "settings", "slabs"}
            assert {target for target in own_imports(name) if not target.startswith("solvers")} <= allowed, name
        if name.startswith("backends."):
            allowed = {"errors", "problem", "profile", "slabs"}
            assert {target for target in own_imports(name) if not target.startswith("backends")} <= allowed, name


def test_a_third_party_package_is_imported_in_one_module():
    for package, allowed in ONE_MODULE.items():
        users = {name for name, path in MODULES.items() if package in {m.split(".")[0] for m in imported_modules(path)}}
        assert users == allowed


def test_only_settings_reads_the_environment():
    readers = {name for name, path in MODULES.items() if re.search(r"os\.environ|getenv", path.read_text())}
    assert readers == {"settings"}


def test_units_are_written_and_read_in_one_place():
    writers = {
        name
        for name, path in MODULES.items()
        if re.search(r"""f".*\}\s?[KMG]iB""", path.read_text()) and name not in ("units", "cli")
    }
    assert writers == set()


def test_exported_names():
    assert ucudnn.__all__ == sorted(ucudnn.__all__)
    for name in ucudnn.__all__:
        assert inspect.getdoc(getattr(ucudnn, name)), f"{name} has no docstring"
    public = {name for name, value in vars(ucudnn).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public == set(ucudnn.__all__)


def test_import_is_light():
    code = "import sys, ucudnn; print(*sys.modules)"
    modules = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    heavy = {"numpy", "pulp", "highspy", "typer", "rich", "torch", "cupy", "ctypes", "sqlite3", "matplotlib"}
    assert "ucudnn.handle" in modules
    assert modules & heavy == set()


def test_errors_are_one_tree_drawn_in_the_docstring():
    drawn = {}
    parents = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"( *)\* (\w+)", line)
        if match:
            depth = len(match[1]) // 2
            parents[depth:] = [match[2]]
            drawn[match[2]] = parents[depth - 1] if depth else None
    assert sorted(drawn) == sorted(errors.__all__)
    for name, parent in drawn.items():
        exception = getattr(errors, name)
        assert exception.__base__.__name__ == parent or (
            parent in [base.__name__ for base in exception.__bases__] if parent else exception.__base__ is Exception
        )
        assert exception.__doc__


@pytest.mark.parametrize("name", ["problem", "configuration", "plan", "settings", "kernel", "networks", "report"])
def test_facts_are_frozen(name):
    module = import_module(f"ucudnn.{name}")
    found = [value for value in vars(module).values() if dataclasses.is_dataclass(value)]
    assert found
    for value in found:
        assert value.__dataclass_params__.frozen, value


def test_classes_of_backends_and_solvers_are_abstract_or_final():
    found = 0
    for name in MODULES:
        if not name.startswith(("backends.", "solvers.")):
            continue
        module = import_module(f"ucudnn.{name}")
        for value in vars(module).values():
            plain = inspect.isclass(value) and value.__module__ == module.__name__
            if not plain or dataclasses.is_dataclass(value) or getattr(value, "__members__", None):
                continue
            if getattr(value, "_is_protocol", False):
                continue
            found += 1
            assert inspect.isabstract(value) or getattr(value, "__final__", False), value
    assert found >= 4


def test_modules_are_small_and_have_one_noun():
    for name, path in MODULES.items():
        assert not set(name.split(".")) & {"utils", "helpers", "common", "misc"}
        assert len(path.read_text().splitlines()) <= 400, name
    sources = [path for path in (PACKAGE / "native").rglob("*") if path.suffix in (".h", ".hpp", ".cpp")]
    assert len(sources) > 4
    for path in sources:
        lines = path.read_text().splitlines()
        assert len(lines) <= 400, path
        assert max(map(len, lines)) <= 120, path


def test_readme_names_every_variable_and_module():
    readme = (ROOT / "README.md").read_text()
    assert set(VARIABLES) == {field.name for field in dataclasses.fields(Settings)}
    for variable in VARIABLES.values():
        assert f"`{variable}`" in readme
    for name in MODULES:
        if name != "__init__" and "." not in name:
            assert f"`{name}.py`" in readme or f"`{name}/`" in readme, name
