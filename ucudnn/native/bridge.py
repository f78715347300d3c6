"""Bridge: the structures and functions through which C++ asks the planner, in one process (src/planner.hpp)."""

import atexit
import ctypes
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import replace
from itertools import count
from typing import Any, final

from ucudnn.backends.base import Scaling
from ucudnn.backends.cudnn.api.described import (
    DescribedProblem,
    convolution_facts,
    described_problem,
    filter_facts,
    tensor_facts,
)
from ucudnn.backends.fork_locks import LockLevel, new_lock
from ucudnn.errors import BackendUnavailableError, UnsupportedProblemError
from ucudnn.native.planner import NativePlanner
from ucudnn.native.steps import PlanRequest, StepStruct
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.reporting.output_file import form, report_path, write_content
from ucudnn.reporting.report import Report
from ucudnn.settings import report_file

Reports = Mapping[int, Sequence[Report]]
"""The reports of each GPU, one for each workspace limit."""


def write_report(path: str, reports: Reports, refused: Mapping[str, int]) -> None:
    """Write a report to what `report_path` returns: as JSON or CSV to a path that ends so, else as text.

    `refused` tells how many kernels were left to plain cuDNN, by reason.

    Raises:
        OutputError: if it cannot be written.
        OSError: if stderr cannot be written.
    """
    if path.endswith(".json"):
        found = {f"cuda:{device}": [each.to_dict() for each in own] for device, own in reports.items()}
        content = json.dumps({"reports": found, "left": dict(refused)}, indent=1) + "\n"
    elif path.endswith(".csv"):
        content = form([each for own in reports.values() for each in own], path)
    else:
        blocks = []
        for device, own in reports.items():
            for each in own:
                calls = sum(kernel.calls for kernel in each.kernels)
                name = each.conditions.get("device", each.backend)
                blocks.append(f"cuda:{device}: {name}\n{each}\ncalls: {calls}\n")
        left = [f"left to plain cuDNN: {count} x {reason}\n" for reason, count in refused.items()]
        content = "\n".join(blocks or ["no convolution was planned\n"]) + "".join(left)
    write_content(path, content)


VERSION = 2
"""Version of the interface with the compiled library (src/planner.hpp)."""

NO_LIMIT, UNSTATED = -1, -2
"""Values for callers that state that there is no limit, and for callers that state nothing."""

_OPERATIONS = (Operation.FORWARD, Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER)
_DIMENSIONS, _SPATIAL = 5, 3


class QuestionStruct(ctypes.Structure):
    """The contents of four descriptors (src/question.hpp)."""

    _fields_ = (
        *((name, c_int32) for name in ("operation", "deterministic", "dims", "x_type", "w_type", "y_type", "w_format")),
        *((name, c_int32 * _DIMENSIONS) for name in ("x_size", "x_stride", "w_size", "y_size", "y_stride")),
        *((name, c_int32 * _SPATIAL) for name in ("padding", "stride", "dilation")),
        *((name, c_int32) for name in ("mode", "compute_type", "math_type", "groups", "unused")),
    )


class RequestStruct(ctypes.Structure):
    """A request for a plan (src/planner.hpp)."""

    _fields_ = (
        ("question", POINTER(QuestionStruct)),
        ("handle", c_uint64),
        ("cudnn", c_void_p),
        ("device", c_int32),
        ("alignment", c_int32),
        ("alpha", c_double),
        ("beta", c_double),
        ("start", c_int64),
        ("failed", c_char_p),
        ("most_bytes", c_uint64),
    )


class AnswerStruct(ctypes.Structure):
    """The answer to a question or a request (src/planner.hpp)."""

    _fields_ = (
        ("count", c_int32),
        ("divided", c_int32),
        ("steps", POINTER(StepStruct)),
        *((name, c_uint64) for name in ("token", "generation", "workspace_bytes", "offset_bytes", "arena_bytes")),
        ("calls", POINTER(c_uint64)),
        ("text", c_char_p),
    )


_ASK = ctypes.CFUNCTYPE(c_int32, c_uint64, c_int32, POINTER(QuestionStruct), c_int64, POINTER(AnswerStruct))
_PLAN = ctypes.CFUNCTYPE(c_int32, POINTER(RequestStruct), POINTER(AnswerStruct))
_FORGET = ctypes.CFUNCTYPE(None, c_uint64, c_uint64)
_REPORT = ctypes.CFUNCTYPE(c_int32, c_char_p)
_MOST_REASONS = 64  # that a report lists: texts name problems, of which there may be any number


class CallbacksStruct(ctypes.Structure):
    """The functions that C++ calls, and the values that it gives for them (src/planner.hpp)."""

    _fields_ = (
        ("ask", _ASK),
        ("plan", _PLAN),
        ("forget", _FORGET),
        ("report", _REPORT),
        ("cudnn", c_char_p),
        ("device", c_int32),
        ("version", c_int32),
    )


@final
class Bridge:
    """Answers the calls of C++.

    Args:
        cudnn_library: the cuDNN that the program uses.
        device: number of the GPU whose planner is opened at once; others are opened at their first call.

    Raises:
        UcudnnError: if CuPy, cuDNN or a GPU is missing, or an environment variable has a wrong value.
    """

    def __init__(self, cudnn_library: str, device: int) -> None:
        file = report_file()
        self._report = None if file is None else report_path(file)
        self._process = os.getpid()
        self._refused: dict[str, int] = {}
        self._cudnn_library = cudnn_library
        self._planners = {device: NativePlanner(device, cudnn_library)}
        self._kept: dict[int, dict[int, object]] = {}  # by handle and token: objects that plans refer to
        self._texts: dict[int, bytes] = {}
        self._tokens = count(1)
        self._lock = new_lock(LockLevel.FACE)

    def ask(self, handle: int, device: int, question: Any, limit: int, answer: Any) -> int:
        """Register a kernel; return 0 if it will be computed in micro-batches."""

        def body() -> None:
            problem = _problem(question.contents)
            planner = self._planner(device)
            if limit != UNSTATED:
                planner.state(problem, None if limit == NO_LIMIT else limit)
            planner.register(handle, problem)
            answer.contents.generation, answer.contents.arena_bytes = planner.generation, planner.arena_bytes

        return self._guarded(handle, answer, body)

    def plan(self, request: Any, answer: Any) -> int:
        """Make a plan; return 0 if that succeeded."""
        wanted = request.contents

        def body() -> None:
            planner = self._planner(wanted.device)
            plan_request = PlanRequest(
                handle=wanted.handle,
                cudnn=wanted.cudnn,
                problem=_problem(wanted.question.contents, wanted.alignment),
                scaling=Scaling(wanted.alpha, wanted.beta),
                start=wanted.start,
                failed=(wanted.failed or b"").decode(),
                most_bytes=wanted.most_bytes,
            )
            prepared = planner.plan(plan_request)
            steps = (StepStruct * len(prepared.steps))(*prepared.steps)
            told = answer.contents
            told.count = len(steps)
            told.steps = ctypes.cast(steps, POINTER(StepStruct))
            told.token = next(self._tokens)
            told.generation = planner.generation
            told.workspace_bytes = prepared.workspace_bytes
            told.arena_bytes = planner.arena_bytes
            told.calls = ctypes.cast(prepared.calls.buffer_info()[0], POINTER(c_uint64))
            if prepared.segment is not None:
                told.divided, told.offset_bytes = 1, prepared.segment.offset_bytes
            self._kept.setdefault(plan_request.handle, {})[told.token] = steps, prepared
            self._tell(plan_request.handle, answer, prepared.text)

        return self._guarded(wanted.handle, answer, body)

    def forget(self, handle: int, token: int) -> None:
        """Forget one plan of a handle, or everything of the handle if token is 0.

        Handle 0 stands for the end of the process: it ends all background work, and writes the report.
        """
        if not handle:
            for planner in self._planners.values():
                planner.stop()
            self.write_report()
            return
        with self._lock:
            if token:
                self._kept.get(handle, {}).pop(token, None)
                return
            self._kept.pop(handle, None)
            self._texts.pop(handle, None)
            for planner in self._planners.values():
                planner.forget(handle)

    def report(self, path: bytes) -> int:
        """Write the report to a path; return 0 if that succeeded."""
        with self._lock:
            return self._written(lambda: report_path(os.fsdecode(path)))

    def write_report(self) -> None:
        """Write the report for which UCUDNN_REPORT asks, once; a forked child leaves that to its parent."""
        # No lock: a thread that plans while the process exits may never give it back.
        path, self._report = self._report, None
        if path is not None and os.getpid() == self._process:
            self._written(lambda: path)

    def _written(self, named: Callable[[], str]) -> int:
        try:
            path = named()
            write_report(path, {at: each.reports() for at, each in self._planners.items()}, self._refused)
        except BaseException as error:  # noqa: BLE001  # the program goes on, or ends
            with suppress(Exception):
                sys.stderr.write(f"ucudnn: the report was not written: {error}\n")
            return 1
        return 0

    def _planner(self, device: int) -> NativePlanner:
        if device not in self._planners:
            self._planners[device] = NativePlanner(device, self._cudnn_library)
        return self._planners[device]

    def _guarded(self, handle: int, answer: Any, body: Callable[[], None]) -> int:
        with self._lock:
            try:
                body()
            except BaseException as error:  # noqa: BLE001  # after any error C++ continues with plain cuDNN
                self._tell(handle, answer, f"{type(error).__name__}: {error}")
                reason = self._texts[handle].decode()
                if reason in self._refused or len(self._refused) < _MOST_REASONS:
                    self._refused[reason] = self._refused.get(reason, 0) + 1
                return 1
            return 0

    def _tell(self, handle: int, answer: Any, text: str) -> None:
        self._texts[handle] = " ".join(text.split()).encode()
        answer.contents.text = self._texts[handle]


def attach(address: int) -> None:
    """Write the functions that C++ calls to its table, which is given by its address.

    Raises:
        UcudnnError: if CuPy, cuDNN or a GPU is missing, an environment variable has a wrong value, or the library was
            compiled from other sources.
    """
    table = CallbacksStruct.from_address(address)
    if table.version != VERSION:
        raise BackendUnavailableError(
            f"libucudnn.so has version {table.version}, this package {VERSION}: run `python -m ucudnn.native --build`"
        )
    bridge = Bridge((table.cudnn or b"").decode(), table.device)
    table.ask, table.plan, table.forget = _ASK(bridge.ask), _PLAN(bridge.plan), _FORGET(bridge.forget)
    table.report = _REPORT(bridge.report)
    _ATTACHED.append((table, bridge))
    atexit.register(_detach, table, bridge)


_ATTACHED: list[tuple[CallbacksStruct, Bridge]] = []
"""Objects whose addresses C++ holds, so they live as long as the process."""


def _detach(table: CallbacksStruct, bridge: Bridge) -> None:
    bridge.write_report()
    # C++ may destroy handles after Python has ended, and must not call Python then.
    table.ask, table.plan, table.forget = _ASK(), _PLAN(), _FORGET()
    table.report = _REPORT()


def _problem(question: QuestionStruct, alignment: int | None = None) -> ConvolutionProblem:
    """Return the problem that descriptors describe.

    Raises:
        UnsupportedProblemError: if no problem can express it.
    """
    dims = question.dims
    found = described_problem(
        _OPERATIONS[question.operation],
        tensor_facts(question.x_type, tuple(question.x_size[:dims]), tuple(question.x_stride[:dims])),
        filter_facts(question.w_type, question.w_format, tuple(question.w_size[:dims])),
        convolution_facts(
            tuple(question.padding[: dims - 2]),
            tuple(question.stride[: dims - 2]),
            tuple(question.dilation[: dims - 2]),
            question.mode,
            question.compute_type,
            question.math_type,
            question.groups,
        ),
        tensor_facts(question.y_type, tuple(question.y_size[:dims]), tuple(question.y_stride[:dims])),
    )
    if not isinstance(found, DescribedProblem):
        raise UnsupportedProblemError(f"{_OPERATIONS[question.operation].value} {found}")
    problem = found.deterministic if question.deterministic else found.problem
    return problem if alignment is None else replace(problem, alignment=alignment)
