"""Workspace division on several streams: branches of an Inception-like module at the same time, in disjoint segments.

Small on purpose, so that it can also be run under `compute-sanitizer --tool memcheck` and `racecheck`.
"""

import pytest

import ucudnn
from tests.support.gpu import Operands, open_or_skip, tolerance
from ucudnn import Effort
from ucudnn.backends.candidates import Candidates
from ucudnn.problem import ConvolutionProblem, Operation

BRANCHES = {  # the filters' size of the layers of each branch
    "1x1": (1,),
    "3x3": (1, 3),
    "5x5": (1, 5),
    "pool": (1,),
}
GROUPS = [[[f"{branch}.{index}" for index in range(len(sizes))] for branch, sizes in BRANCHES.items()]]


def problem_of(size):
    return ConvolutionProblem(
        operation=Operation.FORWARD,
        batch=4,
        channels=16,
        spatial=(9, 9),
        filters=16,
        kernel=(size, size),
        padding=(size // 2, size // 2),
    )


@pytest.mark.parametrize("named", [True, False], ids=["groups", "unnamed"])
@pytest.mark.parametrize("count", [4, 1], ids=["four streams", "one stream"])
def test_branches_of_a_module(cupy, named, count):
    groups = GROUPS if named else None
    handle = ucudnn.Handle(
        backend=open_or_skip(Candidates.GRAPH),
        total_workspace="2MiB",
        groups=groups,
        effort=Effort(warmup=0, repeats=1, time_limit_ms=1),
    )
    operands = {
        (branch, index, operation): Operands.random(cupy, problem_of(size).with_operation(operation))
        for branch, sizes in BRANCHES.items()
        for index, size in enumerate(sizes)
        for operation in Operation
    }
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(count)]
    for turn in range(3):
        for each in operands.values():
            each.poison()
        cupy.cuda.Device().synchronize()
        for phase in ((Operation.FORWARD,), (Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER)):
            for index in range(2):
                for place, (branch, sizes) in enumerate(BRANCHES.items()):
                    for operation in phase if index < len(sizes) else ():
                        each = operands[branch, index, operation]
                        with streams[(place + turn) % count]:
                            name = f"{branch}.{index}" if named else ""
                            handle.convolve(each.problem, *each.addresses(), layer=name)
    cupy.cuda.Device().synchronize()
    for each in operands.values():
        assert each.error(cupy, each.expected()) <= tolerance(each.problem)
    kernels = handle.report().kernels
    assert len(kernels) == len(operands)
    assert [kernel.calls for kernel in kernels] == [3] * len(operands)
    assert 0 <= handle.workspace_bytes <= 2 * 2**20
