"""What all tests share: a clean environment, hypothesis profiles and the recorded profile."""

import gc
import logging
import os
import signal
import sys
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from ucudnn.backends.candidates import Candidates
from ucudnn.backends.cpu.backend import CpuBackend
from ucudnn.backends.replay import ReplayBackend
from ucudnn.cli.app import main
from ucudnn.profiles.format import load_profile

EXAMPLES = {"local": 15, "ci": 40, "long": 250}  # of each property, by profile; `--hypothesis-profile` chooses one, too
for name, number in EXAMPLES.items():
    settings.register_profile(name, max_examples=number, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "local"))


MARKED = {  # the marks of all tests of some folders and files
    "slow": ("tests/bench/", "tests/benchmarking/parallel/", "tests/fuzz/"),
    "extra": (
        "tests/torch/",
        "tests/memory/torch/",
        "tests/memory/test_attention.py",
        "tests/memory/reports/test_snapshot.py",
        "tests/native/",
        "tests/cudnn/test_declarations.py",
    ),
}


def pytest_configure():
    """Let this process, and those that tests start, keep the modules that they compile, and take Ctrl-C.

    Otherwise, each of some hundred processes would compile this package again where the environment says so, and each
    run all tests; and in a job in the background, which ignores Ctrl-C, none would end by it.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_itemcollected(item):
    """Mark the tests of some folders and files, before tests are chosen by marks."""
    for mark, places in MARKED.items():
        if item.nodeid.startswith(places):
            item.add_marker(mark)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Return how many processes `-n auto` takes: one for each processor, but not more than 8."""
    return min(8, len(os.sched_getaffinity(0)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes():
    """Let NumPy's BLAS compute in one thread in each process of pytest-xdist, and in those that tests start.

    Each has a processor. Where all are busy, a thread of OpenBLAS waits for another one at each product, actively: 144
    products of a row with 384x384 filters then take a processor 1150 ms instead of 8.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Let a process of pytest-xdist that has no tests left take some of another one's, to the last but one.

    By default, processes get their last tests in pairs, and wait for the one whose pair is slow.
    """
    from xdist.scheduler import WorkStealingScheduling  # not at the top, because tests run without it, too

    return WorkStealingScheduling(config, log) if config.getvalue("dist") == "load" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Put slow tests before all others where processes share the tests: at the end, the others would wait for them."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Let the garbage collector pass over what is there before the first test: modules, and the tests themselves.

    Each step that is traced asks for a whole collection. With all tests and PyTorch in a process, that takes longer
    than to trace a small step.
    """
    gc.collect()
    gc.freeze()


@cache
def fit_one_step():
    """Fit a small step once in this process, because the first fit imports hundreds of modules of PyTorch."""
    if find_spec("torch") is not None:
        from tests.support.small_networks import small_network
        from ucudnn.memory import fit

        model, (x, y), loss = small_network("inplace")
        fit(model, (x, y), loss=loss, policy="stock")(x, y).backward()


@pytest.fixture
def older_objects_frozen(monkeypatch):
    """Let collections pass over what the first fit and other tests have left, too; see above.

    A fit asks for five collections. They took 60 ms each, and take 3. It also counts what is frozen, to see whether
    that is anything, which takes 30 ms.
    """
    fit_one_step()
    gc.collect()
    gc.freeze()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)


@pytest.fixture
def older_objects_released():
    """Release what this process has frozen, so that a fit freezes objects as it does in a program."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter, config):
    """Print what was skipped and why, and how to repeat this run's random order, each in one line.

    pytest's own lines of skipped tests are hundreds without a GPU, and pytest-randomly's is not shown with `-q`.
    """
    from tests.support.skips import skip_line  # later than the top, because pytest rewrites assertions of that package

    skipped = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", [])]
    if line := skip_line(skipped):
        terminalreporter.write_line(line)
    if (seed := config.getoption("randomly_seed", None)) is not None:
        terminalreporter.write_line(f"random order: repeat it with `-p randomly --randomly-seed={seed}`")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Let a test that needs a GPU, and all that it prepares, wait for its turn."""
    from tests.support.gpu_turns import gpu_turn  # as above

    if item.get_closest_marker("gpu") is None:
        return (yield)
    with gpu_turn(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture(autouse=True)
def clean_environment(clean_torch_flags, monkeypatch):  # in this order, because some tests take PyTorch away
    # Tests measure for themselves, and leave nothing behind; a tool that slows them down may keep what they measured.
    database = os.environ.get("TEST_DATABASE", "off")
    for variable in [name for name in os.environ if name.startswith("UCUDNN_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("UCUDNN_DATABASE", database)


@pytest.fixture(autouse=True)
def clean_logging():
    """Restore the logger of the package, which `python -m ucudnn.torch` sets up for its process."""
    logger = logging.getLogger("ucudnn")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate


@pytest.fixture
def clean_torch_flags():
    """Restore PyTorch's flags, which scripts set for their process; later tests would compute in another way."""
    from tests.support.torch_flags import kept_torch_flags  # later than the top, as above

    with kept_torch_flags():
        yield


@pytest.fixture(scope="module")
def one_thread():
    """Let PyTorch compute in one thread, here and in processes that a test starts.

    Sums have one order then. Small steps are also much quicker on a machine with other work, because threads wait for
    each other at each operator.
    """
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


# Helpers are in modules that pytest does not collect: let it explain their assertions, too.
pytest.register_assert_rewrite("tests.support")


@pytest.fixture(scope="session")
def h200_every():
    """Return the path of a profile of whatever cuDNN 9.19 offers at powers of two, measured on an H200.

    Profiles leave out what is beaten in time and workspace; this one does not.
    """
    return Path(__file__).parent / "data" / "h200_every.json"


@pytest.fixture(scope="session")
def h200(h200_every):
    return replace(load_profile(str(h200_every)), name="h200")


@pytest.fixture(scope="session")
def replay(h200):
    """Return a replay backend for a network of the recorded profile, the same one for all tests of a process.

    It keeps nothing but what it has looked up in the profile, whose thousands of problems it would sort for each test.
    """

    @cache
    def make(network, candidates=Candidates.GRAPH):
        return ReplayBackend(h200, candidates=candidates, network=network)

    return make


@pytest.fixture
def call(monkeypatch, capsys):
    """Return a function that runs `ucudnn` in this process, which spares each call a Python of its own.

    It returns exit status, standard output and standard error.
    """

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["ucudnn", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def hungry(monkeypatch):
    """Return the CPU backend without the algorithms that need no workspace."""
    algorithms = CpuBackend.algorithms
    monkeypatch.setattr(
        CpuBackend, "algorithms", lambda self, problem: [a for a in algorithms(self, problem) if a.workspace_bytes]
    )
    return CpuBackend()
