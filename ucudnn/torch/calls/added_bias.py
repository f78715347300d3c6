"""Who adds the bias of a convolution: an engine that computes the convolution, or another kernel behind it."""

from dataclasses import replace

from ucudnn.backends.cudnn.algorithms.legacy_call import ADDED
from ucudnn.configuration import Configuration
from ucudnn.problem import ConvolutionProblem


def is_fused(configuration: Configuration) -> bool:
    """Return whether the engines of a configuration add the bias themselves, in each part."""
    calls = [each for part in configuration.parts for each in part.slabs or (part,)]
    return not any(each.algorithm.endswith(ADDED) for each in calls)


def without_addition(
    problem: ConvolutionProblem, configuration: Configuration
) -> tuple[ConvolutionProblem, Configuration]:
    """Return what is left to compute if the caller adds the bias, where another kernel would add it."""
    if not problem.biased or not all(part.algorithm.endswith(ADDED) for part in configuration.parts):
        return problem, configuration
    parts = (replace(part, algorithm=part.algorithm.removesuffix(ADDED)) for part in configuration.parts)
    return problem.without_bias(), replace(configuration, parts=tuple(parts))
