"""Opens benchmarks as settings say: with a database, and with others that measure too."""

from ucudnn.backends.base import Backend
from ucudnn.benchmarking.benchmark import Benchmark, ProgressListener, Share
from ucudnn.profiles.measurement import Effort
from ucudnn.settings import Settings


def open_benchmark(
    backend: Backend,
    settings: Settings,
    *,
    effort: Effort | None = None,
    listener: ProgressListener | None = None,
    exhaustive: bool = False,
) -> Benchmark:
    """Return a benchmark of a backend.

    Args:
        backend: what is measured.
        settings: database and devices.
        effort: how much time goes into one measurement.
        listener: is told of progress.
        exhaustive: measure what cannot enter the desirable set as well.

    Raises:
        DatabaseError: if the database cannot be opened, or a newer ucudnn wrote it.
        SettingsError: if GPUs cannot share the work.
    """
    # Loads sqlite3: not before there is something to measure.
    from ucudnn.benchmarking.storage.store import open_store

    store = open_store(settings.database, backend)
    effort = effort or Effort()
    share: Share | None = None
    if settings.benchmark_devices is not None:
        from ucudnn.benchmarking.parallel.processes import WorkerOptions
        from ucudnn.benchmarking.parallel.ranks import open_share

        options = WorkerOptions(
            backend=backend.name, effort=effort, cudnn_library=settings.cudnn_library, exhaustive=exhaustive
        )
        share = open_share(backend, settings.benchmark_devices, options)
    return Benchmark(backend, effort=effort, listener=listener, store=store, share=share, exhaustive=exhaustive)
