"""The commands and examples of README and the handbook that need a GPU run unchanged."""

import pytest

from tests.support.documents import README, Reader, at, examples_at
from tests.support.printed import masked
from tests.support.reader_programs import TRAIN


@pytest.mark.parametrize("page", at("gpu"))
def test_the_commands_of_a_page_run_in_turn(cupy, page, tmp_path, request):
    if page == "pytorch":
        request.getfixturevalue("torch_gpu")
    (tmp_path / "train.py").write_text(TRAIN)
    reader = Reader(tmp_path, UCUDNN_DATABASE=str(tmp_path / "measurements.sqlite"))
    columns = next(line for line in masked(README) if line.startswith("layer operation x"))
    for command in at("gpu")[page]:
        printed = reader.types(command.runs)
        assert not command.runs.startswith("ucudnn time") or columns in masked(printed)
        assert "train.py" not in command.runs or "trained 3" in printed


@pytest.mark.parametrize("example", examples_at("gpu"), ids=range(len(examples_at("gpu"))))
def test_an_example_runs(cupy, example):
    names = {}
    exec(compile(example, "documents", "exec"), names)
    assert names["handle"]
    cupy.get_default_memory_pool().free_all_blocks()
