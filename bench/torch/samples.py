"""The samples with which PyTorch tests its convolution functions, with ucudnn off and on; lists every difference.

    python -m bench.torch.samples                  2 minutes on a GPU
    python -m bench.torch.samples --backend cpu    a trial of the script

The samples come with PyTorch (torch.testing._internal) and cover conv1d to conv3d and the transposed functions: shapes,
strides, paddings, groups, no batch, and inputs that PyTorch refuses. The script compares outputs and all gradients with
their strides, and the errors that are raised.
"""

import logging
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch

import ucudnn.torch
from bench.tools.results import save
from bench.tools.script import out_of, run_main
from bench.torch.conformance_plugin import stand_in_for_expecttest
from bench.torch.measuring import conditions, device_of, torch_command_line
from ucudnn import Effort
from ucudnn.torch.overrides import process_overrides

TOLERANCE = {
    torch.float16: 5e-3,
    torch.bfloat16: 3e-2,
    torch.float32: 5e-3,
    torch.float64: 1e-10,
    torch.complex64: 5e-3,
}
"""Largest relative L2 distance from PyTorch's result; for float32 as TF32 multiplies it on GPUs."""


def outcome(function: Any, sample: Any) -> list[torch.Tensor] | Exception:
    """Return output and gradients, or the exception that the function raises."""
    given = [sample.input, *sample.args, *sample.kwargs.values()]
    try:
        out = function(sample.input, *sample.args, **sample.kwargs)
        wanted = [each for each in given if isinstance(each, torch.Tensor) and each.requires_grad]
        random = torch.Generator(out.device).manual_seed(0)  # the same weights for both ways
        weights = torch.randn(out.shape, generator=random, dtype=out.dtype, device=out.device)
        gradients = torch.autograd.grad(out, wanted, weights) if wanted else ()
    except Exception as error:  # noqa: BLE001  # the other way must raise the same
        return error
    return [out.detach(), *gradients]


def difference(own: Any, other: Any, dtype: torch.dtype) -> str:
    """Return the difference of two outcomes; '' if there is none."""
    if isinstance(own, Exception) or isinstance(other, Exception):
        same = type(own) is type(other) and str(own) == str(other)
        return "" if same else f"{own!r} against {other!r}"[:300]
    for index, (one, two) in enumerate(zip(own, other, strict=True)):
        if one.shape != two.shape or one.stride() != two.stride() or one.dtype is not two.dtype:
            return f"result {index}: {one.shape} {one.stride()} against {two.shape} {two.stride()}"
        distance = float((one - two).abs().double().norm() / max(float(one.abs().double().norm()), 1e-30))
        if not distance <= TOLERANCE[dtype]:
            return f"result {index}: {distance:.1e} off"
    return ""


def in_time(remaining: Iterator[Any], seconds: float) -> Iterator[Any]:
    """Yield the cases until time is up; the clock starts after the first, because PyTorch takes long to list them."""
    end = None
    for each in remaining:
        yield each
        end = end or perf_counter() + seconds
        if perf_counter() > end:
            return


def cases(device: torch.device) -> Iterator[tuple[str, torch.dtype, Any, Any]]:
    """Yield name, type, function and sample of each case."""
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        if "conv" not in info.name or not info.name.startswith("nn.functional"):
            continue
        for dtype in TOLERANCE:
            if info.supports_dtype(dtype, device.type):
                made = info.sample_inputs(device, dtype, requires_grad=True)
                yield from ((info.name, dtype, info.op, sample) for sample in made)
        if info.error_inputs_func is not None:
            yield from ((info.name, torch.float32, info.op, each.sample_input) for each in info.error_inputs(device))


def main() -> bool:
    """Compare, print and write; return whether there is no difference."""
    parser = torch_command_line(__doc__, __spec__.name)
    parser.add_argument("--limit", default="1MiB", help="ucudnn's limit for each convolution (%(default)s)")
    parser.add_argument("--policy", default="all", help="ucudnn's batch-size policy (%(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after this time")
    arguments = parser.parse_args()
    device = device_of(arguments)
    torch.backends.cudnn.benchmark = False  # each sample is seen once
    logging.getLogger("ucudnn").setLevel(logging.ERROR)
    stand_in_for_expecttest()
    effort = Effort(warmup=0, repeats=1, time_limit_ms=2)
    on = ucudnn.torch.enable(
        backend=arguments.backend, workspace_limit=arguments.limit, policy=arguments.policy, effort=effort
    )
    interceptor = process_overrides.interceptor
    ucudnn.torch.disable()
    found: list[dict[str, str]] = []
    count = 0

    def answer() -> dict[str, object]:
        summary = on.report()
        counts = {"samples": count, "calls": summary.calls, "left": summary.left}
        return {"conditions": conditions(device), **counts, "cut_off": cut_off, "differences": found}

    cut_off, remaining = True, cases(device)
    for name, dtype, function, sample in in_time(remaining, arguments.seconds):
        own = outcome(function, sample)
        process_overrides.use(interceptor)
        other = outcome(function, sample)
        ucudnn.torch.disable()
        count += 1
        if count % 20 == 0:
            save(out_of(arguments), answer())
        text = difference(own, other, dtype)
        if text:
            shapes = [tuple(each.shape) for each in (sample.input, *sample.args) if isinstance(each, torch.Tensor)]
            found.append({"function": name, "type": str(dtype), "shapes": str(shapes), "difference": text})
            print(f"{name} {dtype} {shapes} {sample.kwargs}: {text}", flush=True)
    cut_off = next(remaining, None) is not None
    done = answer()
    left = sum(on.report().left.values())
    print(f"{count} samples, {done['calls']} convolutions through ucudnn, {left} left to PyTorch")
    print(f"{len(found)} differences, 0 required{', but not all samples were seen' if cut_off else ''}")
    save(out_of(arguments), done)
    return not found


if __name__ == "__main__":
    run_main(main)
