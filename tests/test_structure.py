"""The structure that the package keeps: folders, imports, names, sizes, and who may import what.

Each rule is a function of `tests.support.structure`. `test_each_rule_can_fail` runs it on a package that breaks it.
"""

import dataclasses
import inspect
import re
import subprocess
import sys
from graphlib import CycleError
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import ucudnn
from tests.support import structure
from ucudnn import errors
from ucudnn.settings import VARIABLES, Settings

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ucudnn"
MODULES = structure.modules_of(PACKAGE)

MOST_MODULES = 12
MOST_LINES = 400
MOST_LINES_OF_A_FUNCTION = 60
MOST_PARAMETERS = 7

VOCABULARY = {
    *("problem", "kernel", "slabs", "configuration", "policy", "settings", "errors", "units", "arrays", "bounded"),
    "command_line",
}
ROOMS = {  # each room: the rooms directly under it; imports go down only
    "vocabulary": (),
    "profiles": ("vocabulary",),
    "networks": ("vocabulary",),
    "backends": ("profiles", "networks"),
    "workspace": ("backends",),
    "solvers": ("vocabulary",),
    "benchmarking": ("workspace", "solvers"),
    "planning": ("benchmarking",),
    "execution": ("planning",),
    "reporting": ("execution",),
    "handle": ("reporting",),
    "plots": ("reporting",),
    "__init__": ("handle",),
    "torch/device": ("handle",),
    "torch/calls": ("torch/device",),
    "torch/gate": ("torch/calls",),
    "torch/steps": ("torch/calls",),
    "torch/trials": ("torch/calls",),
    "torch/tuning": ("torch/gate", "torch/steps", "torch/trials"),
    "torch": ("torch/tuning", "plots"),
    "memory/step": ("profiles", "solvers"),  # a recorded step writes its convolutions as a profile does
    "memory/devices": ("memory/step",),
    "memory/plans": ("memory/step",),
    "memory/simulation": ("memory/plans",),
    "memory/pools": ("memory/simulation",),  # the papers'
    "memory/allocator": ("memory/pools",),  # PyTorch's own
    "memory/policies/swaps": ("memory/simulation",),
    "memory/policies": ("memory/pools", "memory/policies/swaps"),
    "memory/planner": ("memory/policies", "memory/allocator"),
    "memory/reports": ("memory/planner",),
    "memory": ("memory/planner", "memory/reports", "memory/devices"),
    "memory/torch/subject": ("memory/step", "torch"),
    "memory/torch/tracing": ("memory/torch/subject",),
    "memory/torch/device": ("memory/torch/subject", "memory/allocator"),
    "memory/torch/measuring": ("memory", "memory/torch/tracing", "memory/torch/device"),
    "memory/torch/convolutions": ("memory/torch/measuring",),
    "memory/torch/division": ("memory/planner", "memory/torch/tracing"),
    "memory/torch/codegen": ("memory/torch/tracing", "memory/torch/device", "memory/plans"),
    "memory/torch/hooks": ("memory/torch/device", "memory/torch/tracing"),
    "memory/torch/sharding": ("memory/torch/device", "memory/reports"),
    "memory/torch/compiling": ("memory/torch/measuring", "memory/torch/sharding"),
    "memory/torch/running": (
        "memory/torch/sharding",
        "memory/torch/convolutions",
        "memory/torch/codegen",
        "memory/torch/division",
        "memory/torch/compiling",
        "memory/torch/hooks",
    ),
    "memory/torch/comparison": ("memory/torch/running",),
    "memory/torch": ("memory/torch/comparison",),
    "cudnn": ("handle", "plots"),
    "native": ("handle", "plots"),
    "cli": ("torch", "cudnn", "native", "memory/torch"),
    "__main__": ("cli",),
}
ROOMY = {("torch", "calls"), ("memory", "torch", "tracing"), ("cudnn",), ("backends", "cpu")}
SHARED_FILE_NAMES = {
    *("backend", "bench", "base", "problem", "factory", "division", "plan", "report", "planner", "replay")
}
PLACES = {  # a package from elsewhere: the modules or folders that import it
    "numpy": (
        *("backends", "execution.overlap", "solvers", "torch"),
        *("memory.plans", "memory.pools.planned", "memory.simulation.copy_bounds"),
    ),
    "pulp": ("solvers.integer_program", "memory"),
    "typer": ("cli",),
    "rich": ("reporting.terminal",),
    "matplotlib": ("plots",),
    "torch": ("torch", "memory.torch", "memory.attention"),
    "nnunetv2": ("memory.torch.nnunet",),
    "networkx": ("memory.torch.compiling.rematerialization",),
    "ctypes": (
        *("backends.cpu.blas_threads", "backends.cudnn.api.library", "backends.cudnn.gpu.driver", "native"),
        "torch.gate.call_gate",
        "memory.torch.device.nvml",
        "reporting.terminal",
    ),
    "cupy": ("backends.cudnn.gpu.cupy_gpu",),
    "sqlite3": ("benchmarking.storage.connection", "benchmarking.storage.sqlite_file"),
    "platformdirs": ("benchmarking.storage.store",),
}
ATEN_CONVOLUTION = ["stride", "padding", "dilation", "transposed", "output_padding", "groups"]


def room_of(module):
    """Return the room of a module: its folder, for files of the root the vocabulary or a room of their own.

    Subfolders of the two large wings are rooms of their own. Those of other folders have no circles, as below.
    """
    if module.name == "memory.attention":
        return "memory/torch"
    if module.folder:
        return "/".join(module.folder) if module.folder[0] in ("torch", "memory") else module.folder[0]
    return "vocabulary" if module.stem in VOCABULARY else module.stem


def is_face(module, function, owner):
    """Whether others state a function's parameters: callers of the public API, the command line, cuDNN or PyTorch."""
    public = function.name == "__init__" or not function.name.startswith("_")
    if owner:
        exported = public and (owner in ucudnn.__all__ or owner in module.exported())
    else:
        exported = function.name in module.exported()
    calls = [each.func for each in function.decorator_list if hasattr(each, "func")]
    command = any(getattr(call, "attr", "") == "command" for call in calls)
    names = structure.parameters(function)
    aten = any(names[at : at + len(ATEN_CONVOLUTION)] == ATEN_CONVOLUTION for at in range(len(names)))
    return exported or command or aten


def test_folders_are_small():
    assert {"__init__", "problem", "handle", "cli.app", "backends", "backends.replay", "solvers.division"} <= {*MODULES}
    assert structure.crowded_folders(MODULES, MOST_MODULES, ROOMY) == []


def test_imports_go_down_the_rooms():
    assert {room_of(module) for module in MODULES.values()} <= set(ROOMS)
    assert structure.upward_imports(MODULES, ROOMS, room_of) == []


def test_there_are_no_circles():
    assert structure.import_circles(MODULES) == []


ABOVE = {each.folder[:depth] for each in MODULES.values() for depth in range(len(each.folder))}


def subfolder_of(module):
    """Return the subfolder of a module that has no folders below it; a file beside subfolders stands for itself."""
    return module.name if module.folder in ABOVE else "/".join(module.folder)


def test_subfolders_have_no_circles():
    floors = {}
    for name, module in MODULES.items():
        below = {subfolder_of(MODULES[each]) for each in structure.own_imports(MODULES, module) if each in MODULES}
        floors.setdefault(subfolder_of(MODULES[name]), set()).update(below - {subfolder_of(module)})
    assert len(floors) > 60
    structure.reachable({room: tuple(sorted(below)) for room, below in floors.items()})  # it refuses a circle


def test_no_module_imports_the_package_root():
    assert [name for name in MODULES if "__init__" in structure.own_imports(MODULES, MODULES[name])] == []


def test_a_file_name_says_one_thing():
    assert structure.twin_files(MODULES, SHARED_FILE_NAMES) == {}
    stems = {stem for module in MODULES.values() for stem in module.name.split(".")}
    assert not stems & {"utils", "helpers", "common", "misc"}


def test_a_class_name_says_one_thing():
    assert structure.twin_classes(MODULES) == {}


def test_functions_are_small():
    assert structure.large_functions(MODULES, MOST_LINES_OF_A_FUNCTION, MOST_PARAMETERS, is_face) == {}


def test_modules_are_small():
    assert [name for name, module in MODULES.items() if len(module.lines) > MOST_LINES] == []
    sources = [path for path in PACKAGE.rglob("*") if path.suffix in (".h", ".hpp", ".cpp")]
    assert len(sources) > 4
    for path in sources:
        lines = path.read_text().splitlines()
        assert len(lines) <= MOST_LINES, path
        assert max(map(len, lines)) <= 120, path


def test_a_third_party_package_is_imported_in_one_place():
    assert structure.misplaced_packages(MODULES, PLACES) == []


def test_no_test_module_imports_another_one_and_they_mirror_the_folders_of_the_package():
    tests = structure.modules_of(ROOT / "tests")
    del tests["test_structure"]  # its examples of broken packages import tests
    assert structure.borrowed_tests(tests) == []
    rooms = {module.folder[0] for module in MODULES.values() if module.folder}
    tested = {module.folder[0] for module in tests.values() if module.folder and module.stem.startswith("test_")}
    assert tested - {"bench", "gpu", "fuzz"} <= rooms


def test_only_settings_reads_the_environment():
    assert structure.environment_readers(MODULES) == {"settings"}


def test_units_are_written_and_read_in_one_place():
    pattern = re.compile(r"""f".*\}\s?[KMG]iB""")
    writers = {name for name, module in MODULES.items() if any(pattern.search(line) for line in module.lines)}
    assert writers <= {"units"}


def test_exported_names():
    assert ucudnn.__all__ == sorted(ucudnn.__all__)
    for name in ucudnn.__all__:
        assert inspect.getdoc(getattr(ucudnn, name)), f"{name} has no docstring"
    public = {name for name, value in vars(ucudnn).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public == set(ucudnn.__all__)


def test_import_is_light():
    code = "import sys, ucudnn; print(*sys.modules); ucudnn.Handle; print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    before, after = (set(line.split()) for line in printed.splitlines())
    assert {each for each in before if each.startswith("ucudnn")} == {"ucudnn"}  # the command takes Ctrl-C first
    assert "ucudnn.handle" in after
    assert after & {*PLACES, "highspy"} == set()


def test_a_name_that_is_not_public_is_no_attribute():
    assert {*ucudnn.__all__} <= {*dir(ucudnn)}
    with pytest.raises(AttributeError, match="module 'ucudnn' has no attribute 'Handles'"):
        _ = ucudnn.Handles


def import_everything():
    """Import all modules of the package that this interpreter can; those of PyTorch and nnU-Net where these are."""
    for name, module in MODULES.items():
        needs_torch = ("torch" in module.folder or name == "memory.attention") and find_spec("torch") is None
        needs_nnunet = module.stem == "nnunet" and find_spec("nnunetv2") is None
        if not (module.stem.startswith("__") or needs_torch or needs_nnunet):
            import_module(f"ucudnn.{name}")


def drawn_exceptions():
    """Return {name: name of its parent or None} from the tree in the docstring of errors.py."""
    drawn = {}
    parents = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"( *)\* (\w+)", line)
        if match:
            depth = len(match[1]) // 2
            parents[depth:] = [match[2]]
            drawn[match[2]] = parents[depth - 1] if depth else None
    return drawn


def test_errors_are_one_tree_drawn_in_the_docstring():
    for name, parent in drawn_exceptions().items():
        exception = getattr(errors, name)
        assert parent in [base.__name__ for base in exception.__bases__] if parent else exception.__base__ is Exception
        assert exception.__doc__


def test_every_exception_is_drawn():
    import_everything()
    own = {each for each in structure.subclasses(errors.UcudnnError) if each.__module__.startswith("ucudnn.")}
    assert len(own) > 15
    assert {each.__name__ for each in own} == {*drawn_exceptions()}
    assert {each.__module__ for each in own} == {"ucudnn.errors"}


def test_facts_are_frozen():
    names = ["problem", "configuration", "execution.plan", "settings", "kernel", "networks.tables", "reporting.report"]
    for name in names:
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


def test_the_handbook_names_every_folder():
    assert set(VARIABLES) == {field.name for field in dataclasses.fields(Settings) if field.compare}
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text[text.index("| folder | job |") :]
    for folder in {module.folder[0] for module in MODULES.values() if module.folder}:
        assert f"`{folder}/`" in table, folder


def package(root, files):
    """Return the modules of a package that is written for a test."""
    for name, text in {"__init__.py": "", **files}.items():
        path = root / "rooms" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return structure.modules_of(root / "rooms")


def rooms_of_two(module):
    return module.folder[0] if module.folder else module.stem


def anyone(module, function, owner):
    return False


def upward(modules):
    return structure.upward_imports(modules, {"low": (), "high": ("low",), "__init__": ("high",)}, rooms_of_two)


def test_a_circle_of_rooms_is_refused():
    with pytest.raises(CycleError, match="nodes are in a cycle"):
        structure.reachable({"a": ("b",), "b": ("a",)})


LONG = "def long():\n" + "    pass\n" * 60
RULES = {
    "upward": ({"low/a.py": "import rooms.high.b", "high/b.py": ""}, upward, ["low.a imports high.b"]),
    "in a function": (
        {"low/a.py": "def f():\n    from rooms.high import b", "high/b.py": ""},
        upward,
        ["low.a imports high.b"],
    ),
    "downward": ({"low/a.py": "", "high/b.py": "from rooms.low.a import A"}, upward, []),
    "circle through a folder": (
        {
            "low/__init__.py": "from rooms.low.b import B",
            "low/b.py": "import rooms.a",
            "a.py": "import rooms.low.c",
            "low/c.py": "",
        },
        structure.import_circles,
        ["a -> low -> low.b -> a"],
    ),
    "circles": ({"a.py": "import rooms.b", "b.py": "from rooms import a"}, structure.import_circles, ["a -> b -> a"]),
    "crowd": (
        {f"{folder}/{name}.py": "" for folder in ("low", "roomy") for name in ("a", "b", "c", "__init__")},
        lambda modules: structure.crowded_folders(modules, 2, {("roomy",)}),
        ["low: 3"],
    ),
    "twin files": (
        {"low/a.py": "", "high/a.py": "", "low/b.py": "", "high/b.py": ""},
        lambda modules: structure.twin_files(modules, {"b"}),
        {"a": ["high", "low"]},
    ),
    "twin classes": (
        {"a.py": "class Step: ...\nclass _Own: ...", "b.py": "def f():\n    class Step: ...\nclass _Own: ..."},
        structure.twin_classes,
        {"Step": ["a", "b"]},
    ),
    "long function": (
        {"a.py": LONG + "class C:\n    def f(self, a, b, c, d, e, f, g, *, h): ..."},
        lambda modules: list(structure.large_functions(modules, 60, 7, anyone)),
        ["a.long", "a.C.f"],
    ),
    "long face": (
        {"a.py": LONG + "    pass\n" + "def f(a, b, c, d, e, f, g, h): ..."},
        lambda modules: list(structure.large_functions(modules, 60, 7, lambda *_: True)),
        ["a.long"],
    ),
    "packages": (
        {"a.py": "import numpy.random", "b.py": "from numpy import array\nimport json, attrs"},
        lambda modules: structure.misplaced_packages(modules, {"numpy": ("a",)}),
        ["b imports attrs", "b imports numpy"],
    ),
    "borrowed tests": (
        {
            "test_a.py": "from tests.low.test_b import helper",
            "test_b.py": "PROGRAM = 'from tests.test_a import x'",
            "test_c.py": "from tests.support.reference import make\nfrom tests.low.conftest import y",
            "low/test_d.py": "def f():\n    import tests.test_c",
            "low/test_e.py": "from tests.low import (\n    conftest,\n    test_d,\n)\nfrom tests import test_a as b",
        },
        structure.borrowed_tests,
        [
            "low.test_d imports tests.test_c",
            "low.test_e imports tests.low.test_d",
            "low.test_e imports tests.test_a",
            "test_a imports tests.low.test_b",
            "test_b imports tests.test_a",
        ],
    ),
    "environment": (
        {"a.py": "import os\nx = os.environ", "b.py": "from os import getenv", "c.py": "import os\nos.sep"},
        structure.environment_readers,
        {"a", "b"},
    ),
}


@pytest.mark.parametrize(("files", "rule", "wrong"), RULES.values(), ids=RULES)
def test_each_rule_can_fail(tmp_path, files, rule, wrong):
    assert rule(package(tmp_path, files)) == wrong
