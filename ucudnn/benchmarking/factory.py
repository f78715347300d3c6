"""Opens benchmarks as settings say: with a database, and with other processes that measure too."""

from typing import TYPE_CHECKING

from ucudnn.backends.base import Backend, ComputeBackend
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.benchmarking.measurer import ProgressListener
from ucudnn.profiles.measurement import Effort
from ucudnn.settings import Settings

if TYPE_CHECKING:
    from ucudnn.benchmarking.parallel.processes import Processes
    from ucudnn.benchmarking.parallel.ranks import Ranks


def open_benchmark(
    backend: Backend,
    settings: Settings,
    *,
    effort: Effort | None = None,
    listener: ProgressListener | None = None,
    exhaustive: bool = False,
    measures: bool = True,
) -> Benchmark:
    """Return a benchmark of a backend; `measures` says whether plans wait for measurements.

    Raises:
        DatabaseError: if the path is no place for a database, such as a folder or a file of another program.
        SettingsError: if the devices cannot share the work.
    """
    # The store loads sqlite3, which waits until there is something to measure.
    from ucudnn.benchmarking.storage.store import open_store

    storage = open_store(settings.database, backend)
    effort = effort or Effort()
    parallel = open_parallel(backend, settings, effort, exhaustive=exhaustive)
    benchmark = Benchmark(
        backend,
        effort=effort,
        listener=listener,
        storage=storage,
        parallel=parallel,
        exhaustive=exhaustive,
        remeasure=settings.remeasure,
    )
    if not measures:
        benchmark.plan_at_once()
    return benchmark


def open_parallel(
    backend: Backend, settings: Settings, effort: Effort, *, exhaustive: bool = False
) -> "Processes | Ranks | None":
    """Return the processes or ranks that measure together, or None for this process alone.

    Raises:
        SettingsError: if a GPU does not exist, or if the ranks of torch.distributed are not initialized.
    """
    devices = settings.benchmark_devices
    if devices is None or not isinstance(backend, ComputeBackend):
        return None
    if devices == "ranks":
        from ucudnn.benchmarking.parallel.ranks import Ranks

        return Ranks(settings.called("benchmark_devices"))
    from ucudnn.benchmarking.parallel.processes import Processes, WorkerOptions

    wanted = tuple(backend.devices()) if isinstance(devices, str) else devices
    if wanted == (backend.device(),):
        return None
    options = WorkerOptions(
        backend=backend.name,
        effort=effort,
        cudnn_library=settings.cudnn_library,
        exhaustive=exhaustive,
        devices_name=settings.called("benchmark_devices"),
    )
    return Processes(backend, wanted, options)
