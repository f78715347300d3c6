"""Every exception that ucudnn raises on purpose.

* UcudnnError
  * InvalidValueError           an argument or a text with an invalid value
    * InvalidSizeError          a size in bytes that cannot be read
    * InvalidProblemError       shapes, strides or types that do not make a convolution
    * InvalidNetworkError       a layer table that cannot be read
    * SettingsError             a setting or an environment variable with an invalid value
    * StepGraphError            operations and storages that do not make a training step
      * LayoutError             an operator that returned another tensor than in the trace of a step
    * MemoryPlanError           a plan of a training step that would read, free or recompute what is not there
  * MemoryLimitError            a workspace for which a stated limit of memory has no room
  * OutputError                 a file or a standard output that cannot be written
  * InfeasibleError             no configuration fits the workspace limit
    * BudgetError               no plan of a training step fits the memory budget
  * FittedStepError             a call of a fitted step that its plan does not have
  * StepFileError               a recorded training step that cannot be read
    * StepFileVersionError      a recorded training step of an unknown version
  * MeasurementError            no algorithm of a kernel could be measured
  * ProfileError                a recorded profile that cannot be read
    * NotRecordedError          a problem without a measurement in the profile
  * DatabaseError               a database of measurements that cannot be used
    * DatabaseVersionError      a database with the tables of another version of ucudnn
  * PlanFileError               a file of plans that cannot be used
  * SolverError                 an integer program that was not solved
    * SolverUnavailableError    a solver that is not installed or not known
  * BackendError                a backend that cannot carry out a request
    * BackendUnavailableError   a backend that is not installed or not known
    * ReentryError              a convolution inside another one of the same thread
    * UnsupportedProblemError   a problem that the backend cannot compute, or not with this algorithm
    * CudnnError                a function of cuDNN that returned an error status
    * StepError                 a step of a plan that could not be prepared or launched
"""

from collections.abc import Iterable
from typing import Any


class UcudnnError(Exception):
    """The root of the tree; whoever catches it catches everything that ucudnn raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions travel between processes. Python would call the constructor with the message alone, and it may want
        # more.
        return type(self).__new__, (type(self), *self.args), self.__dict__


class InvalidValueError(UcudnnError, ValueError):
    """An argument or a text has an invalid value."""


class InvalidSizeError(InvalidValueError):
    """A size in bytes could not be read."""


class InvalidProblemError(InvalidValueError):
    """Shapes, strides, types or parameters do not make a convolution."""


class InvalidNetworkError(InvalidValueError):
    """A network is neither known by name nor readable as a table of layers."""


class SettingsError(InvalidValueError):
    """A setting has an invalid value, as an argument or in the environment."""


class StepGraphError(InvalidValueError):
    """Operations and storages do not make a training step; the message names the operation and the storage."""


class LayoutError(StepGraphError):
    """An operator returned a tensor that lies otherwise than in the trace of a step.

    Attributes:
        found: how it lies.
        place: the index of the operator's call among all that were traced, and the position of the result.
    """

    def __init__(self, message: str, found: Any = None, place: tuple[int, int] = (0, 0)) -> None:
        super().__init__(message)
        self.found, self.place = found, place


class MemoryPlanError(InvalidValueError):
    """A plan reads, frees or recomputes what is not there.

    Attributes:
        action: index of the action in the plan at which that shows, the number of actions where it shows at the end.
        operation: index of the operation in the step, or None.
        storage: index of the storage in the step, or None.
    """

    def __init__(self, message: str, *, action: int, operation: int | None = None, storage: int | None = None) -> None:
        super().__init__(message)
        self.action = action
        self.operation = operation
        self.storage = storage


class MemoryLimitError(MemoryError, UcudnnError):
    """A stated limit of memory has no room for a workspace beside the live bytes, however much the GPU has left."""


class OutputError(UcudnnError):
    """A file, a picture or the standard output could not be written."""


class InfeasibleError(UcudnnError):
    """No configuration fits the workspace limit.

    Attributes:
        kernel: the kernel that needs most, or '' if it has no name.
        limit_bytes: the given limit.
        required_bytes: the smallest sufficient limit.
    """

    def __init__(self, message: str, *, kernel: str, limit_bytes: int, required_bytes: int) -> None:
        super().__init__(message)
        self.kernel = kernel
        self.limit_bytes = limit_bytes
        self.required_bytes = required_bytes


class BudgetError(InfeasibleError):
    """No plan of a training step fits the memory budget.

    Attributes:
        kernel: the operation that needs most.
        limit_bytes: the budget that was given.
        required_bytes: the smallest budget that would do: the floor of the step, or of the policy that was asked for.
    """


class FittedStepError(UcudnnError, RuntimeError):
    """Forward or backward of a fitted step was called in an order, or for gradients, that its plan does not have."""


class StepFileError(UcudnnError):
    """A recorded training step cannot be read."""


class StepFileVersionError(StepFileError):
    """A recorded training step has a version that this ucudnn does not know."""


class MeasurementError(UcudnnError):
    """No algorithm of a kernel could be measured, or a measured time is not a valid one."""


class ProfileError(UcudnnError):
    """A recorded profile cannot be read."""


class NotRecordedError(ProfileError):
    """The profile has no measurement of a problem."""


class PlanFileError(UcudnnError):
    """A file of plans is damaged, of another version, or was made for another device, other versions or limits."""


class SolverError(UcudnnError):
    """An integer program was not solved, or its solution failed the check."""


class SolverUnavailableError(SolverError):
    """A solver is not known or not installed."""


class DatabaseError(UcudnnError):
    """A database of measurements cannot be used."""


class DatabaseVersionError(DatabaseError):
    """A database of measurements has tables of another version of ucudnn."""


class BackendError(UcudnnError):
    """A backend cannot carry out a request."""


class BackendUnavailableError(BackendError):
    """A backend is not known or not installed."""


class ReentryError(BackendError):
    """A convolution was called while another one ran in the same thread, as a signal handler can do."""


class UnsupportedProblemError(BackendError):
    """The backend cannot compute a problem, or not with this algorithm."""


class CudnnError(BackendError, RuntimeError):
    """A function of cuDNN returned an error status; `ucudnn.cudnn.CuDNNError` is another name of this class.

    Attributes:
        status: the cudnnStatus_t.
        infos: the lines that `add_info` added.
    """

    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(f"cuDNN Error: {text or status}")
        self.status = status
        self.infos: list[str] = []

    def add_info(self, info: str) -> None:
        """Add a line with more information."""
        self.infos.append(info)

    def add_infos(self, infos: Iterable[str]) -> None:
        """Add lines with more information."""
        self.infos.extend(infos)

    def __str__(self) -> str:
        """Return the status with its text, and the added lines."""
        return "\n  ".join([super().__str__(), *self.infos])


class StepError(BackendError):
    """An algorithm failed when a plan prepared or launched it; all steps before it were launched.

    Attributes:
        algorithm: name of the algorithm.
        size: the micro-batch size at which it failed.
        start: the first sample that is not computed.
        left: the slabs of the micro-batch that are not computed, if others are; else ().
    """

    def __init__(self, algorithm: str, size: int, start: int, cause: Exception, left: tuple[object, ...] = ()) -> None:
        super().__init__(f"{algorithm} failed on a {'slab of a ' if left else ''}micro-batch of {size}: {cause}")
        self.algorithm = algorithm
        self.size = size
        self.start = start
        self.left: tuple[Any, ...] = left


def began_with_interrupt(error: BaseException | None) -> bool:
    """Return whether Ctrl-C led to an error.

    Python 3.11 makes another error of it while a class is made, and libraries do while they are imported.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
