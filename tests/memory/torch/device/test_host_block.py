"""Tests of the host's block of memory: what the machine and the container leave, and what is refused."""

import os

import pytest

from ucudnn.errors import BudgetError
from ucudnn.memory.torch.device.host_block import HostBlock, check_host_memory, host_memory, pages

GIB = 2**30


@pytest.fixture
def system(tmp_path):
    """Return a function that writes files of the system, with 64 GiB of which 48 are available."""

    def write(**files):
        found = {"proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemAvailable: {48 * 2**20} kB\n", **files}
        for name, text in found.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def test_without_a_container_the_machine_counts(system):
    assert host_memory(system(**{"proc/self/cgroup": "0::/\n"})) == (64 * GIB, 48 * GIB)


def test_the_limit_of_a_container_counts(system):
    root = system(**{
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{5 * GIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {GIB}\n",
    })  # fmt: skip
    assert host_memory(root) == (64 * GIB, 4 * GIB)


def test_the_tightest_group_around_the_process_counts(system):
    root = system(**{
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/outer/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "sys/fs/cgroup/outer/inner/memory.current": f"{GIB}\n",
    })  # fmt: skip
    assert host_memory(root)[1] == GIB


def test_groups_of_version_one_count(system):
    root = system(**{
        "proc/self/cgroup": "5:cpu:/\n4:memory:/docker/12ab\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    })  # fmt: skip
    assert host_memory(root)[1] == 2 * GIB
    unlimited = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}
    assert host_memory(system(**unlimited))[1] == 48 * GIB


def test_a_block_fits_or_is_refused_with_the_reason(system):
    root = system(**{
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory.current": "0\n",
    })  # fmt: skip
    check_host_memory(8 * GIB, None, root)
    with pytest.raises(BudgetError, match=r"9 GiB of host memory.*, and 8 GiB are left to this process"):
        check_host_memory(9 * GIB, None, root)
    with pytest.raises(BudgetError, match=r"needs 33 GiB .*half of the machine's memory is 32 GiB"):
        check_host_memory(33 * GIB, None, root)
    with pytest.raises(BudgetError, match="the limit for host memory is 1 GiB") as caught:
        check_host_memory(2 * GIB, GIB, root)
    assert (caught.value.limit_bytes, caught.value.required_bytes) == (GIB, 2 * GIB)


def test_this_machine_has_memory():
    total, left = host_memory()
    assert 0 < left <= total < 2**50


def test_a_block_has_exactly_its_bytes_from_the_begin_of_a_page():
    block = HostBlock(5000, pinned=False)
    assert block.memory.numel() == 5000
    assert block.memory.data_ptr() % 4096 == 0
    assert not block.memory.is_pinned()
    block.release()
    assert block.memory.numel() == 0
    assert HostBlock(0, pinned=True).memory.numel() == 0


@pytest.mark.parametrize("pinned", [False, True])
def test_pages_are_zeros_and_a_fork_neither_copies_nor_changes_what_is_to_be_pinned(pinned):
    found = pages(5 * 2**20 + 3, pinned=pinned)
    assert not found.count_nonzero()
    assert found.data_ptr() % 4096 == 0
    found.fill_(7)
    shown = found.numpy()
    child = os.fork()
    if not child:  # without PyTorch, whose threads the child does not have
        seen = int(shown[0]), int(shown[-1])
        shown[:] = 9
        os._exit(0 if seen == ((0, 0) if pinned else (7, 7)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert set(found.tolist()) == {7 if pinned else 9}
