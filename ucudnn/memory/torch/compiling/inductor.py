"""PyTorch's Inductor, which compiles a graph or a step: the one module that knows names of it that are not public.

Inductor keeps what it has compiled in its cache on disk, and finds it there by the graph.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ucudnn.memory.torch.subject.traced_values import TracedTensor

Compiled = Callable[..., Sequence[Tensor]]


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):  # of PyTorch about itself, which a program may have made errors
        yield


@_quietly()
def compiled(
    graph: GraphModule, arguments: Sequence[TracedTensor], results: Sequence[TracedTensor], device: torch.device
) -> Compiled | None:
    """Return the compiled code of a graph, which takes and returns tensors that lie as they were traced.

    A graph of one call is not compiled where Inductor leaves it as it is: None is returned.

    Raises:
        Exception: whatever Inductor raises where it cannot compile the graph.
    """
    # Importing these takes a second, which a step that is not compiled need not wait for.
    from torch._dynamo.convert_frame import compile_lock
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    def written(*args: Tensor) -> tuple[()]:
        for target, found in zip(args[len(arguments) :], graph(*args[: len(arguments)]), strict=True):
            target.copy_(found)
        return ()

    # Inductor asks its cache only where a tracing context has fake tensors with an environment for sizes. What a plan
    # gives lies as it was traced, and the host would check it as long as it takes for an operator.
    wanted = {"triton.cudagraphs": False, "size_asserts": False, "alignment_asserts": False}
    patched = config.patch({name: value for name, value in wanted.items() if value is not getattr(config, name, value)})
    with compile_lock, torch.no_grad(), torch._C._DisableAutocast(), patched:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        with mode:
            given = [each.empty(device) for each in (*arguments, *results)]
            traced = joint_graph_passes(make_fx(functionalize(written), select_decomp_table())(*given))
        if _calls(graph) == 1 and _calls(traced) <= 2:  # the call, and the copy into its result
            return None
        (output,) = traced.graph.find_nodes(op="output")
        output.meta["user_visible_output_idxs"] = []
        with tracing(TracingContext(mode)):
            code: Any = compile_fx_inner(traced, given, static_input_idxs=(), is_inference=True)
    lies, run = [(each.shape, each.stride, each.dtype) for each in results], code

    # What the code returns is allocated before its scratch, as plans have it, and lies as eager PyTorch laid it.
    def call(*args: Tensor) -> list[Tensor]:
        nonlocal run
        found = [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in lies]
        run([*args, *found])
        if run is code:  # what it does around its kernels is done in the first call
            run = getattr(code, "current_callable", None) or code
        return found

    return call


def compiled_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile compiles when it is first called.

    It has code of its own: torch.compile keeps what it has compiled by code, and no more than eight for each.
    """

    def step(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    own = FunctionType(step.__code__.replace(), step.__globals__, step.__name__, None, step.__closure__)
    found: Any = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal found
        found = found or torch.compile(own, dynamic=False)  # which imports the compiler
        return found(*args, **kwargs)

    return call


def _calls(graph: GraphModule) -> int:
    return sum(each.op == "call_function" for each in graph.graph.nodes)


@contextmanager
def backward_at_once() -> Iterator[None]:
    """Let what is called inside compile backward with forward, so that errors come before anything has run."""
    with _quietly():
        from torch._functorch import config

        known: Any = config
        name = "force_non_lazy_backward_lowering"
        with known.patch({name: True} if hasattr(known, name) else {}):
            yield


def shortened(error: Exception) -> str:
    """Return what a compiler or its code has raised, in one line."""
    lines = [each.strip() for each in f"{type(error).__name__}: {error}".splitlines()]
    return next(filter(None, lines), "")[:200]
