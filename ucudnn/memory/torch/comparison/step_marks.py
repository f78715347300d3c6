"""Marks in the work of a device, and the time between two of them."""

from time import perf_counter
from typing import Any

import torch


def mark(device: torch.device) -> Any:
    """Return a mark behind all that was issued to a device so far; a GPU reaches it later."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def passed_ms(begin: Any, end: Any) -> float:
    """Return the milliseconds between two marks of one device, which has reached both."""
    return (end - begin) * 1e3 if isinstance(begin, float) else float(begin.elapsed_time(end))
