"""README's examples for a GPU run unchanged."""

import pytest

from tests.support.documents import blocks

EXAMPLES = [block for block in blocks("python") if "import numpy" not in block and "import torch" not in block]


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_runs(cupy, example):
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["handle"]
    cupy.get_default_memory_pool().free_all_blocks()
