"""The time that is assumed of an algorithm before anything is measured: enough to choose between divisions.

The numbers of the model were fitted to the plans that heuristic mode makes of 117 kernels within 4 to 128 MiB on a
recorded H200. A call takes at least some time. Tensor cores compute faster than other units, but fill up groups of
channels. Few outputs do not keep a GPU busy. And of two algorithms of a kind, the one that heuristics name first is
assumed to be the faster one.
"""

from math import prod, sqrt

from ucudnn.problem import ConvolutionProblem, DataType, MathMode, Operation
from ucudnn.profiles.measurement import Algorithm

_CALL_MS = 0.03
_TENSOR_CORE_PER_MS = 50e9  # multiplications
_OTHERS_PER_MS = 20e9
_DIRECT_PER_MS = 1.2e9  # by cuDNN's engine 0, at most: 1.1e9 is recorded, and 0.3e9 in half of the cases
_CHANNELS = 8  # of which tensor cores compute a multiple
_BUSY_OUTPUTS = 1e6
_REDUCED = 512  # multiplications of a filter gradient that are summed to one of the outputs that keep a GPU busy
_DIRECT = "eng0"
_RANK = 0.01  # of the time, for each algorithm that heuristics name before


def assumed_ms(part: ConvolutionProblem, algorithm: Algorithm, rank: int) -> float:
    """Return the assumed milliseconds of a call. The rank of its algorithm is its place in the heuristics, from 0."""
    return ranked(_first_ms(part, tensor_cores=uses_tensor_cores(algorithm)), rank)


def uses_tensor_cores(algorithm: Algorithm) -> bool:
    """Return whether an algorithm computes on tensor cores, by cuDNN's notes."""
    return "TENSOR_CORE" in algorithm.notes


def direct_ms(part: ConvolutionProblem, algorithm: Algorithm) -> float:
    """Return the least time that cuDNN's engine 0 takes, which no other time that is assumed tells; 0 for others.

    It is fast enough for depth-wise convolutions. Of others it may take a second.
    """
    return part.multiplications / _DIRECT_PER_MS if is_direct(algorithm.name) else 0.0


def is_direct(name: str) -> bool:
    """Return whether this is the name of cuDNN's engine 0, which launches a kernel for each group."""
    return name == _DIRECT or name.startswith((f"{_DIRECT}_", f"{_DIRECT}+"))


def least_ms(part: ConvolutionProblem) -> float:
    """Return the least time that is assumed of any algorithm of a problem; float64 and FMA have no tensor cores."""
    if part.dtype is DataType.FLOAT64 or (part.dtype is DataType.FLOAT32 and part.math is MathMode.FMA):
        return plain_ms(part)
    return min(plain_ms(part), _first_ms(part, tensor_cores=True))


def plain_ms(part: ConvolutionProblem) -> float:
    """Return the time that is assumed of the first algorithm without tensor cores; some of these need no workspace."""
    return _first_ms(part, tensor_cores=False)


def ranked(first_ms: float, rank: int) -> float:
    """Return the assumed time of an algorithm of a rank, given that of the first one of its kind."""
    return (1 + _RANK * rank) * first_ms


def _first_ms(part: ConvolutionProblem, *, tensor_cores: bool) -> float:
    rate = _OTHERS_PER_MS
    if tensor_cores:
        rate = _TENSOR_CORE_PER_MS / (_filled(part.channels // part.groups) * _filled(part.filters // part.groups))
    busy = min(1.0, sqrt(_outputs(part) / _BUSY_OUTPUTS))
    return _CALL_MS + part.multiplications / (rate * busy)


def _filled(channels: int) -> float:
    """Return how many times as many channels tensor cores compute."""
    return -(-channels // _CHANNELS) * _CHANNELS / channels


def _outputs(part: ConvolutionProblem) -> float:
    """Return how many outputs can be computed at the same time."""
    if part.operation is Operation.FORWARD:
        return part.batch * part.filters * prod(part.output)
    if part.operation is Operation.BACKWARD_DATA:
        return part.batch * part.channels * prod(part.spatial)
    return part.multiplications / _REDUCED
