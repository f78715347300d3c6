"""A second process on a GPU knows times and plan of the first one, trains to the same losses, and keeps its budget."""

import pytest

from tests.gpu.memory.trials import trial
from tests.support.large_unet import RECIPE
from ucudnn.benchmarking.storage.step_files import StepFiles
from ucudnn.memory.torch.comparison.trial_result import PYTORCH


@pytest.mark.alone
def test_a_second_process_keeps_its_budget_by_what_the_first_one_found(tmp_path, monkeypatch):
    monkeypatch.setenv("UCUDNN_DATABASE", str(tmp_path / "measurements.db"))
    how = {"recipe": RECIPE, "steps": 3, "capped": True}
    stock = trial(PYTORCH, **how)
    budget = int(0.7 * stock.allocated) + stock.outside
    first = trial("auto", budget, **how)
    folder = StepFiles(str(tmp_path / "measurements.db")).folder
    kept = {path: (path.stat().st_mtime_ns, path.read_text()) for path in folder.glob("*.json")}
    assert len(kept) >= 3  # costs, the plan of the first step, and the plan
    second = trial("auto", budget, **how)
    for each in (first, second):
        assert each.reserved + each.outside <= budget
    count = min(map(len, (first.losses, second.losses)))  # steps are timed again where their plan changes
    assert second.losses[:count] == pytest.approx(first.losses[:count], rel=1e-3)
    assert second.first_ms < first.first_ms
    anew = [path for path, (before, _) in kept.items() if path.stat().st_mtime_ns != before]
    assert not anew, [(path.name, kept[path][1][:600], path.read_text()[:600]) for path in anew]
