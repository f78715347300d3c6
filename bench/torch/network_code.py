"""The code that a cell of `bench.torch.networks` ran; a cell is void when that code has changed. Not a script.

A cell of PyTorch alone ran what makes and measures its network: definitions in scripts, and those that they use. A
script may get another network, or another command line, without any effect on the cell. Every other cell ran, besides,
the modules of ucudnn that its process had imported at its end, and the gate's sources in C++. Of them, those do not
count that compute no step and choose nothing for one (`_PASSIVE`). Comments, docstrings and empty lines never count.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
CELL = "bench/torch/network_cell.py"
STEP = "bench/torch/network_step.py"
MODELS = "bench/memory/models.py"
TRIAL_MODELS = "bench/torch/models.py"
_FOLLOWED = "bench.torch.network_"
"""Scripts whose definitions count where the measurement imports them."""
_PACKAGE = ROOT / "ucudnn"
_PASSIVE = (
    *("ucudnn/__init__.py", "ucudnn/backends/replay.py", "ucudnn/caffe/", "ucudnn/cli/", "ucudnn/memory/"),
    *("ucudnn/native/", "ucudnn/networks/", "ucudnn/plots/", "ucudnn/reporting/", "ucudnn/torch/__main__.py"),
    *("ucudnn/solvers/integer_program.py", "ucudnn/torch/summary.py"),
)
"""What exports names, reports, plans without a device or within a total, or serves other programs."""
_CPU = "ucudnn/backends/cpu/"


def ran(setting: str, backend: str) -> list[str]:
    """Return the files of ucudnn that this process ran under a setting, by their paths from the repository."""
    return (
        []
        if setting.startswith("stock")
        else _counting([*_imported(), *_PACKAGE.glob("torch/gate/src/*.cpp")], backend)
    )


def whole(setting: str, backend: str) -> list[str]:
    """Return the files that a process may have run, if nobody knows what it imported."""
    return (
        [] if setting.startswith("stock") else _counting([*_PACKAGE.rglob("*.py"), *_PACKAGE.rglob("*.cpp")], backend)
    )


def digests(network: str, files: Iterable[str]) -> dict[str, str]:
    """Return a digest of each part of the code that a cell ran.

    Args:
        network: name of its network.
        files: what it ran of ucudnn.

    Returns:
        digests by parts: a file, or FILE:NAME,NAME for some definitions and all those that they use in it.
    """
    own = _named(ast.parse((ROOT / MODELS).read_text(encoding="utf-8")))
    parts = [f"{path}:{','.join(names)}" for path, names in measuring(network).items()]
    parts.append(f"{MODELS}:{','.join(each for each in (network, 'inception_loss') if each in own)}")
    parts += [f"{TRIAL_MODELS}:small_resnet"] * (network == "small")
    return {part: _digest_of(part) for part in sorted([*parts, *files])}


def measuring(network: str) -> dict[str, list[str]]:
    """Return the definitions with which a cell of a network is measured, by script; each script imports the others'."""
    found: dict[str, set[str]] = {STEP: {f"NETWORKS[{network}]"}}
    todo = [(CELL, "measure")]
    while todo:
        path, name = todo.pop()
        if name not in found.setdefault(path, set()) and name != "NETWORKS":  # of which one entry counts
            found[path].add(name)
            todo += _imported_by((ROOT / path).read_text(encoding="utf-8"), name)
    return {path: sorted(names) for path, names in found.items()}


def _imported_by(source: str, name: str) -> Iterable[tuple[str, str]]:
    """Yield the scripts and their definitions that a definition imports, itself or by others in its module."""
    tree = ast.parse(source)
    known = _named(tree)
    used = {each.id for node in _used(tree, [name]) for each in ast.walk(node) if isinstance(each, ast.Name)}
    for each in sorted(used):
        node = known.get(each)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_FOLLOWED):
            yield f"{(node.module or '').replace('.', '/')}.py", each


def digest(code: Mapping[str, str]) -> str:
    """Return one digest of all parts."""
    return _short("\n".join(f"{path} {text}" for path, text in sorted(code.items())))


def changed(code: Mapping[str, str]) -> list[str]:
    """Return the parts that are no longer what they were."""
    return [part for part, text in code.items() if _digest_of(part) != text]


def what_counts(source: str, names: Collection[str] = ()) -> str:
    """Return Python source without comments, docstrings and empty lines.

    Args:
        source: a module.
        names: definitions at its top; only they and those that they use count. 'TABLE[key]' is one entry of a
            dictionary, whose others do not count.
    """
    tree, lines = ast.parse(source), source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for row in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[row - 1] = ""
    nodes: list[ast.stmt | ast.expr] = list(_used(tree, names)) if names else list(tree.body)
    rows = sorted({row for node in nodes for row in range(_first_row(node), (node.end_lineno or node.lineno) + 1)})
    return "\n".join(lines[row - 1].rstrip() for row in rows if lines[row - 1].strip())


def _used(tree: ast.Module, names: Collection[str]) -> Iterable[ast.stmt | ast.expr]:
    """Yield the definitions of some names, and those of all names in them."""
    known = _named(tree)
    done = {name.partition("[")[0] for name in names if "[" in name}  # of these, one entry counts
    todo = []
    for name in names:
        table, _, key = name.rstrip("]").partition("[")
        if key and table in known:
            yield from _entry(known[table], key)
        elif not key:
            todo.append(name)
    while todo:
        name = todo.pop()
        if name in known and name not in done:
            done.add(name)
            yield known[name]
            todo += [each.id for each in ast.walk(known[name]) if isinstance(each, ast.Name)]


def _entry(table: ast.stmt, key: str) -> list[ast.expr]:
    """Return the entry of a dictionary under a text; all others do not count."""
    found = getattr(table, "value", None)
    pairs = zip(found.keys, found.values, strict=True) if isinstance(found, ast.Dict) else ()
    return [value for each, value in pairs if isinstance(each, ast.Constant) and each.value == key]


def _named(tree: ast.Module) -> dict[str, ast.stmt]:
    """Return the statements at the top of a module that bind names, by name."""
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound = (each for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
            found.update((each.id, node) for each in bound)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update((each.asname or each.name.partition(".")[0], node) for each in node.names)
    return found


def _first_row(node: ast.stmt | ast.expr) -> int:
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])


def _imported() -> list[Path]:
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return [Path(each) for each in files if each and Path(each).is_relative_to(_PACKAGE)]


def _counting(paths: Iterable[Path], backend: str) -> list[str]:
    passive = _PASSIVE if backend == "cpu" else (*_PASSIVE, _CPU)
    found = {path.relative_to(ROOT).as_posix() for path in paths}
    return sorted(each for each in found if not each.startswith(passive))


@cache
def _digest_of(part: str) -> str:
    """Return the digest of a part as it is now; each is read once in a process."""
    path, _, names = part.partition(":")
    if not (ROOT / path).exists():
        return ""
    source = (ROOT / path).read_text(encoding="utf-8")
    return _short(what_counts(source, names.split(",") if names else ()) if path.endswith(".py") else source)


def _short(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]
