"""The names of CuPy 13's `cupy.cuda.cudnn`, read in its sources: what a drop-in must answer to."""

import re

from tests.support.paths import ROOT

_FUNCTIONS, _CONSTANTS = (ROOT / "tests" / "data" / "cupy_cudnn.txt").read_text().split("\n\n")

SIGNATURES = {name: parameters.split() for name, parameters in re.findall(r"(\w+)\(([^)]*)\)", _FUNCTIONS)}
"""Parameters of each function, in order."""

CONSTANTS = {f"CUDNN_{name}" for name in _CONSTANTS.split()}
"""The members of its enum."""

GONE = {name for name in CONSTANTS if re.match("CUDNN_ADD_|.*_(NO_WORKSPACE|PREFER_FASTEST|WORKSPACE_LIMIT)$", name)}
"""Those that cuDNN 9 has no longer."""
