"""The network that a command is about, and the backend that computes or replays it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from ucudnn.backends import open_backend
from ucudnn.backends.base import Backend
from ucudnn.backends.candidates import Candidates
from ucudnn.cli.options import CUDNN
from ucudnn.errors import InvalidNetworkError
from ucudnn.networks.tables import NETWORKS, Network, load_network
from ucudnn.networks.variants import Variant
from ucudnn.planning.concurrency import Groups
from ucudnn.planning.decision import Decisions
from ucudnn.policy import BatchSizePolicy, powers_of_two
from ucudnn.reporting.kernel_report import KernelReport, report_kernel
from ucudnn.reporting.report import Report, report_decisions
from ucudnn.settings import Settings, parse_choice

_CPU_BATCH = 16  # a convolution takes NumPy seconds, and a GPU milliseconds


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A network, and the backend that computes or replays its convolutions."""

    network: Network
    variant: Variant
    backend: Backend

    @classmethod
    def open(
        cls, name: str, batch: int | None, variant: Variant, settings: Settings, candidates: str | None
    ) -> "Subject":
        """Return the subject of a command; `network_on` and `open_measured` say what the arguments are."""
        load_network(name, batch)  # an error of the network comes before one of the backend
        backend = open_measured(settings, candidates, name)
        network = network_on(backend, name, batch, variant)
        return cls(network=variant.of_network(network), variant=variant, backend=backend)

    def groups(self, branches: bool) -> Groups:
        """Return the layers that may run at the same time, if --branches asks for them; else ().

        Raises:
            InvalidNetworkError: if the network has no branches.
        """
        if branches and not self.network.groups:
            raise InvalidNetworkError(f"--branches: {self.network.name} has none; inception3 does")
        return self.network.groups if branches else ()

    def lacks_sizes(self, policy: BatchSizePolicy) -> str | None:
        """Return that `adaptive` is no better than `powerOfTwo` here, because a profile has no other sizes; else None.

        A policy that needs a size that was not recorded is an error of the backend; `adaptive` does without.
        """
        if policy is not BatchSizePolicy.ADAPTIVE:
            return None
        for kernel in self.network.kernels():
            recorded = self.backend.sizes(kernel.problem)
            if recorded is None or not recorded <= {*powers_of_two(kernel.problem.batch)}:
                return None
        return f"{self.backend.name} has powers of two only, so policy {policy.value} tries no other micro-batch sizes"

    def report(
        self,
        decisions: Decisions,
        settings: Settings,
        executed: Sequence[KernelReport] = (),
        other_cpus: float | None = None,
    ) -> Report:
        """Return the report of decisions about the network, with the reports of its kernels if they were executed."""
        kernels = executed or [report_kernel(each) for each in decisions.kernels]
        name, policy = self.network.name, settings.policy.value
        return report_decisions(decisions, kernels, self.backend, network=name, policy=policy, other_cpus=other_cpus)


def network_on(backend: Backend, name: str, batch: int | None, variant: Variant | None = None) -> Network:
    """Return a network at the mini-batch size that all commands take where none is typed.

    That is the network's own, _CPU_BATCH where NumPy computes a known network, or the largest that was recorded where
    a recording lacks the network's own. It may have other sizes in another data type, math mode or layout.
    """
    if batch is None and backend.name == "cpu" and name in NETWORKS:
        batch = _CPU_BATCH
    network = load_network(name, batch)
    if batch is None and name in NETWORKS:
        first = network.layers[0].forward
        recorded = backend.sizes(first if variant is None else variant.of(first))
        if recorded and first.batch not in recorded:
            return load_network(name, max(recorded))
    return network


def open_measured(settings: Settings, candidates: str | None, network: str | None = None) -> Backend:
    """Return the backend of some settings, with the algorithms that --candidates names.

    A replay prefers the recording of `network` where several hold the same shape.
    """
    asked = Candidates.BEST if candidates is None else parse_choice(Candidates, candidates, "candidates")
    backend = open_backend(settings.backend, candidates=asked, network=network, cudnn_library=settings.cudnn_library)
    if candidates is not None:  # 'auto' may have opened the CPU
        CUDNN.refuse(["--candidates"], {f"backend {backend.name}": f"backend {backend.name}"})
    return backend
