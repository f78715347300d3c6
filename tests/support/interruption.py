"""Raises an error at any point of a program, and tells whether a training setup is as it was."""

import gc
import logging
import random
import sys
import warnings
from collections import Counter

import numpy as np
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


class Points:
    """The points at which Ctrl-C can come: a function of Python has begun, or one of C has returned.

    Args:
        folders: parts of the names of files whose points count; code of plans has files named '<plan ...>'.
        at: a point, as file, line, what happens there, and how often it has happened; None only counts.
        error: is raised there.
    """

    def __init__(self, folders, at=None, error=None):
        self.counts = Counter()
        self.reached = False
        self._folders, self._at, self._error = folders, at, error

    def __enter__(self):
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _look(self, frame, event, _):
        if event not in ("call", "c_return"):
            return
        file = frame.f_code.co_filename
        if not any(each in file for each in self._folders):
            return
        place = file, frame.f_lineno, event
        self.counts[place] += 1
        if self._at == (*place, self.counts[place]):
            self.reached = True
            raise self._error


def drawn_points(counts, number, seed):
    """Return some points: each place is as likely as the other, and so is each time that it was reached."""
    chance = random.Random(seed)
    places = sorted(counts)
    drawn = [places[chance.randrange(len(places))] for _ in range(number)]
    return [(*place, chance.randint(1, counts[place])) for place in drawn]


def state(model, *others):
    """Return all of a training setup, of the generators and of the modes that can be compared."""
    numbers = {}
    found = {"process": _process(), "modes": _modes()}
    for index, root in enumerate((model, *others)):
        _note(root, f"{index}", found, numbers)
    return found


def _note(value, path, found, numbers):
    if id(value) in numbers:
        found[path] = "as", numbers[id(value)]
        return
    if isinstance(value, torch.Tensor):
        numbers[id(value)] = path
        found[path] = id(value), type(value), value.requires_grad, value.dtype, value.shape, value.stride()
        found[f"{path} bytes"] = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        found[f"{path} hooks"] = [*(value._backward_hooks or {})], [*(value._post_accumulate_grad_hooks or {})]
        if value.is_leaf and value.grad is not None:
            _note(value.grad, f"{path}.grad", found, numbers)
        _note(vars(value), f"{path} attributes", found, numbers)
    elif isinstance(value, dict):
        numbers[id(value)] = path
        found[path] = "dict", id(value), [key if isinstance(key, str) else id(key) for key in value]
        for number, each in enumerate(value.values()):
            _note(each, f"{path}/{number}", found, numbers)
    elif isinstance(value, (list, tuple, set)):
        numbers[id(value)] = path
        found[path] = type(value), id(value), len(value)
        for number, each in enumerate(value):
            _note(each, f"{path}/{number}", found, numbers)
    elif isinstance(value, nn.Module | torch.optim.Optimizer) or getattr(value, "compared", False):
        numbers[id(value)] = path
        found[path] = type(value), id(value)
        _note(vars(value), f"{path}:", found, numbers)
    else:
        found[path] = type(value), _value(value)


def _value(value):
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return repr(value) if isinstance(value, int | float | str | bool) else id(value)


def _process():
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": random.getstate(),
        "numpy": [each.tobytes() if isinstance(each, np.ndarray) else each for each in np.random.get_state()],
        "warnings": (id(warnings.filters), [*warnings.filters], warnings.showwarning),
        "logger": ([*logger.filters], logger.disabled, logger.level),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "modules": (nn.Module.__getattribute__, nn.Module.__setattr__, nn.Module.__call__),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.mkldnn.enabled),
    }


def _modes():
    return {
        "stacks": (_get_current_dispatch_mode_stack(), _get_current_function_mode_stack()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": [(torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in ("cpu", "cuda")],
        "nesting": (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "saving": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "lift": torch._C._only_lift_cpu_tensors(),
    }
