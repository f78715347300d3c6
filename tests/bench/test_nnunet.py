"""What is known of nnU-Net's plans says what is trained, and which bounds hold."""

from math import prod

import pytest

pytest.importorskip("torch")

from bench.memory import nnunet
from bench.tools.results import RESULTS, load, save

pytestmark = [pytest.mark.extra]
SHIPPED = RESULTS / "memory" / "nnunet.json"


def row(cell):
    """Return a cell as if it had trained as predicted; one that is to fill the memory does."""
    if cell.way == nnunet.NEXT:
        return {**cell._asdict(), "batch": 2, "reason": "OutOfMemoryError: full", "machine": {}}
    peak = cell.predicted or 2**30
    found = {"allocated_bytes": peak, "tensor_bytes": peak, "reserved_bytes": peak, "outside_bytes": 0}
    fitted = {"predicted_bytes": peak} if "fit" in cell.way else {}
    return {**cell._asdict(), "batch": 2, "ms": prod(cell.patch) * 1e-4, **found, **fitted, "machine": {}}


def test_bounds_hold_where_all_trains_as_predicted(tmp_path, capsys):
    out = tmp_path / "found.json"
    cases = {name: case for name, case in load(SHIPPED)["cases"].items() if "plans" in case}
    cells = [cell for stage in nnunet.stages(cases) for cell in stage]
    cases |= {str(cell): row(cell) for cell in cells}
    save(out, {"cases": cases})
    assert nnunet.show(out)
    name = str(cells[0])
    cases[name] |= {"allocated_bytes": int(1.04 * cells[0].predicted)}
    save(out, {"cases": cases})
    capsys.readouterr()
    assert not nnunet.show(out)
    text = capsys.readouterr().out
    assert f"MISSED {name}: error of the peak: 3.846 %" in text
