"""The commands and examples of README and the handbook that need PyTorch run, and print what the pages show.

Programs and models that the pages only name stand in the reader's folder.
"""

import re
from functools import partial

import pytest
import torch

from tests.support.documents import Reader, at, examples_at
from tests.support.paths import shared_folder
from tests.support.printed import assert_prints
from tests.support.reader_programs import MODELS, TRAIN
from ucudnn.memory.torch.comparison import trial, trial_table


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    return shared_folder(tmp_path_factory, "pages") / "measurements.sqlite"


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the pages show what is printed without a GPU")
@pytest.mark.parametrize("page", at("torch"))
def test_the_commands_of_a_page_run_in_turn(page, tmp_path, database, monkeypatch):
    monkeypatch.setattr(trial_table, "compare_trials", partial(trial_table.compare_trials, run=trial.run_trial))
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "my_models.py").write_text(MODELS)
    (tmp_path / "torchvision").mkdir()  # its wheels need the PyTorch that they were built for
    (tmp_path / "torchvision" / "__init__.py").write_text(MODELS)
    reader = Reader(tmp_path, here=True, UCUDNN_BACKEND="cpu", UCUDNN_DATABASE=str(database))
    for command in {each.runs: each for each in at("torch")[page]}.values():  # each once
        printed = reader.types(command.runs)
        if command.prints:
            assert_prints(printed, command.prints)
        if "train.py" in command.runs:
            ranks = 2 if command.runs.startswith("torchrun") else 1
            assert len(re.findall(r"^trained \d$", printed, re.M)) == ranks
        if "--report" in command.runs:
            assert re.search(r"convolutions through ucudnn: [1-9]\d*, left to PyTorch: 0", reader.told)
        for path in re.findall(r"(?:--out|--save-plans) (\S+)", command.runs):
            assert (tmp_path / path).stat().st_size > 100


@pytest.mark.parametrize("example", examples_at("torch"), ids=range(len(examples_at("torch"))))
def test_an_example_runs(capsys, monkeypatch, tmp_path, example):
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "documents", "exec"), {})
    shown = re.search("convolutions through ucudnn: [1-9], left to PyTorch: 0", capsys.readouterr().out)
    assert bool(re.search(r"\b(torch|on)\.report\(\)", example)) == bool(shown)
