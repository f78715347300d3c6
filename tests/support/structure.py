"""Read a package's source and list where it breaks a rule of its structure.

Nothing is imported here: every rule reads syntax trees, so imports inside functions and under `TYPE_CHECKING` count.
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path


class Module:
    """One source file of a package.

    Attributes:
        name: its dotted name below the package, such as `backends.cpu.fft`; `__init__` for the package's own.
        folder: the folders between the package and the file, such as `("backends", "cpu")`.
    """

    def __init__(self, package, path):
        self.package = package
        self.path = path
        self.folder = path.relative_to(package).parts[:-1]
        self.stem = path.stem
        self.name = ".".join(self.folder if self.folder and self.stem == "__init__" else (*self.folder, self.stem))

    @cached_property
    def text(self):
        return self.path.read_text()

    @cached_property
    def tree(self):
        return ast.parse(self.text)

    @cached_property
    def nodes(self):
        return tuple(ast.walk(self.tree))

    @property
    def lines(self):
        return self.text.splitlines()

    @cached_property
    def imports(self):
        """The dotted names of all imported modules, and of names imported from modules."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{self.path}: write absolute imports"
                found += (f"{node.module}.{alias.name}" for alias in node.names)
        return tuple(found)

    def exported(self):
        """Return the names in the module's literal `__all__`."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                return set(ast.literal_eval(node.value))
        return set()

    def classes(self):
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]

    def functions(self):
        """Yield (qualified name, node, name of the class or "") of every function, nested ones as well."""

        def visit(node, prefix, owner):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.ClassDef):
                    yield from visit(child, f"{prefix}{child.name}.", child.name)
                elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{prefix}{child.name}", child, owner
                    yield from visit(child, f"{prefix}{child.name}.", "")
                else:
                    yield from visit(child, prefix, owner)

        yield from visit(self.tree, f"{self.name}.", "")


def modules_of(package):
    """Return the modules of a package by name, from its folder."""
    found = [Module(package, path) for path in sorted(Path(package).rglob("*.py"))]
    return {module.name: module for module in found}


def own_imports(modules, module):
    """Yield the names of the package's modules that one module imports."""
    root = f"{module.package.name}."
    for imported in {f"{name}." for name in module.imports}:
        if imported.startswith(root):
            parts = imported.removeprefix(root).split(".")[:-1]
            known = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
            yield next((name for name in known if name in modules), "__init__")


def run_by(modules, module):
    """Yield the names of the modules that run when one module is imported: its imports, and the folders around them."""
    for target in own_imports(modules, module):
        yield target
        parts = target.split(".")
        around = (".".join(parts[:end]) for end in range(1, len(parts)))
        yield from (name for name in around if name in modules and not f"{module.name}.".startswith(f"{name}."))


def import_circles(modules):
    """Return a circle of imports, or nothing."""
    try:
        TopologicalSorter({name: {*run_by(modules, module)} for name, module in modules.items()}).prepare()
    except CycleError as error:
        *circle, _ = reversed(error.args[1])
        first = circle.index(min(circle))
        return [" -> ".join([*circle[first:], *circle[: first + 1]])]
    return []


def reachable(below):
    """Return all rooms under each room; `below` maps a room to those directly under it.

    Raises:
        CycleError: if a room is under itself.
    """
    found = {}
    for room in TopologicalSorter(below).static_order():
        found[room] = {*below[room]}.union(*(found[under] for under in below[room]))
    return found


def upward_imports(modules, below, room_of):
    """Return the imports that do not go down the graph of rooms."""
    allowed = reachable(below)
    wrong = []
    for module in modules.values():
        room = room_of(module)
        for target in own_imports(modules, module):
            other = room_of(modules[target])
            if other != room and other not in allowed[room]:
                wrong.append(f"{module.name} imports {target}")
    return sorted(set(wrong))


def crowded_folders(modules, limit, roomy):
    """Return the folders with more modules than the limit; `roomy` folders may have more."""
    counts = Counter(module.folder for module in modules.values() if not module.stem.startswith("__"))
    return [f"{'/'.join(at) or '.'}: {count}" for at, count in counts.items() if count > limit and at not in roomy]


def twin_files(modules, shared):
    """Return the file names that occur in several folders; `shared` names may."""
    places = defaultdict(list)
    for module in modules.values():
        if not module.stem.startswith("__"):
            places[module.stem].append("/".join(module.folder) or ".")
    return {stem: found for stem, found in places.items() if len(found) > 1 and stem not in shared}


def twin_classes(modules):
    """Return the public class names that are defined more than once, with the modules."""
    places = defaultdict(list)
    for module in modules.values():
        for node in module.classes():
            if not node.name.startswith("_"):
                places[node.name].append(module.name)
    return {name: found for name, found in places.items() if len(found) > 1}


def parameters(function):
    """Return the names of a function's parameters without `self` and `cls`."""
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def body_lines(function):
    """Return how many lines the statements of a function take, without its signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def large_functions(modules, most_lines, most_parameters, is_face):
    """Return the functions with too many lines or parameters, by qualified name.

    The signature and the docstring of a face count neither as lines nor as parameters: others state them.
    """
    wrong = {}
    for module in modules.values():
        for name, function, owner in module.functions():
            face = is_face(module, function, owner)
            lines = body_lines(function) if face else function.end_lineno - function.lineno + 1
            count = 0 if face else len(parameters(function))
            if lines > most_lines or count > most_parameters:
                wrong[name] = f"{lines} lines, {count} parameters"
    return wrong


def misplaced_packages(modules, places):
    """Return the imports of third-party packages, and of those in `places`, outside the places that may have them."""
    wrong = []
    for module in modules.values():
        for package in {name.split(".")[0] for name in module.imports} - {module.package.name}:
            allowed = places.get(package, () if package not in sys.stdlib_module_names else None)
            if allowed is not None and not any(f"{module.name}.".startswith(f"{place}.") for place in allowed):
                wrong.append(f"{module.name} imports {package}")
    return sorted(wrong)


def borrowed_tests(modules):
    """Return the test modules that other modules of the tests import, in programs that they write as well.

    Texts are searched, because to parse all tests takes seconds.
    """
    dotted = re.compile(r"\btests(?:\.\w+)*\.test_\w+")
    listed = re.compile(r"\bfrom (tests(?:\.\w+)*) import (\([^)]*\)|.*)")
    found = set()
    for module in modules.values():
        names = {*dotted.findall(module.text)}
        names |= {
            f"{at}.{name}" for at, rest in listed.findall(module.text) for name in re.findall(r"\btest_\w+", rest)
        }
        found |= {f"{module.name} imports {name}" for name in names}
    return sorted(found)


def environment_readers(modules):
    """Return the modules that touch the process's environment."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    readers = set()
    for module in modules.values():
        attributes = {node.attr for node in module.nodes if isinstance(node, ast.Attribute)}
        imported = {name.removeprefix("os.") for name in module.imports if name.startswith("os.")}
        if names & (attributes | imported):
            readers.add(module.name)
    return readers


def subclasses(root):
    """Return a class and all classes that inherit from it, as far as they were imported."""
    found = {root}
    for each in root.__subclasses__():
        found |= subclasses(each)
    return found
