"""The core of `ucudnn.memory` plans anywhere: importing all of it loads neither PyTorch nor NumPy, nor a solver."""

import subprocess
import sys
from pathlib import Path

import ucudnn.memory

CORE = Path(ucudnn.memory.__file__).parent
OF_TORCH = {"torch", "attention.py", "__main__.py"}  # what needs PyTorch, and is imported only by its name


def test_the_core_loads_no_heavy_package():
    folders = [path for path in CORE.rglob("*.py") if path.relative_to(CORE).parts[0] not in OF_TORCH]
    names = [".".join(("ucudnn.memory", *path.relative_to(CORE).with_suffix("").parts)) for path in folders]
    modules = sorted(name.removesuffix(".__init__") for name in names)
    assert {"ucudnn.memory", "ucudnn.memory.policies.catalog", "ucudnn.memory.pools.planned"} <= set(modules)
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"numpy", "pulp", "highspy", "typer", "rich", "torch", "cupy", "ctypes", "sqlite3", "matplotlib"}
    assert set(loaded) & heavy == set()
