"""The code that a cell of `bench.torch.networks` ran; a cell is void when that code has changed. Not a script.

A cell of PyTorch alone ran only the scripts that make and measure its network. Every other cell ran, besides, the
modules of ucudnn that its process had imported at its end, and the gate's sources in C++.
"""

import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = ("bench/torch/network_cell.py", "bench/memory/models.py", "bench/torch/models.py")
_PACKAGE = ROOT / "ucudnn"


def ran(setting: str) -> dict[str, str]:
    """Return a digest of each file that this process ran under a setting, by the file's path from the repository."""
    return _digests([] if setting.startswith("stock") else [*_imported(), *_PACKAGE.glob("torch/gate/src/*.cpp")])


def whole(setting: str) -> dict[str, str]:
    """Return a digest of each file that a process may have run, of which it is not known what it imported."""
    return _digests([] if setting.startswith("stock") else [*_PACKAGE.rglob("*.py"), *_PACKAGE.rglob("*.cpp")])


def digest(code: Mapping[str, str]) -> str:
    """Return one digest of all files."""
    return _short("\n".join(f"{path} {text}" for path, text in sorted(code.items())).encode())


def changed(code: Mapping[str, str]) -> list[str]:
    """Return the files that are no longer what they were."""
    return [path for path, text in code.items() if _of_file(ROOT / path) != text]


def _imported() -> list[Path]:
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return [Path(each) for each in files if each and Path(each).is_relative_to(_PACKAGE)]


def _digests(paths: list[Path]) -> dict[str, str]:
    found = {path.relative_to(ROOT).as_posix(): _of_file(path) for path in paths}
    return dict(sorted(({each: _of_file(ROOT / each) for each in SCRIPTS} | found).items()))


def _of_file(path: Path) -> str:
    return _short(path.read_bytes()) if path.exists() else ""


def _short(content: bytes) -> str:
    return sha256(content).hexdigest()[:16]
