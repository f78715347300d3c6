"""Where things lie in the repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "tests" / "native"
"""Sources of the stand-ins for cuDNN and CuPy, and of the C++ programs that are tested."""
