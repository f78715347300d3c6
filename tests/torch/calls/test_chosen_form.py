"""Outputs and gradients have the strides that PyTorch's own kernels give them, whatever the layout of the inputs."""

from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.torch_cases import enable_on_cpu

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
HALVES = torch.float16, torch.bfloat16
LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "channels last": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1),
    "as formats have it": lambda t: t.contiguous(memory_format=FORMATS.get(t.dim(), torch.contiguous_format)),
    "sliced": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "sliced channels": lambda t: LAYOUTS["channels last"](torch.cat([t, t], 1))[:, : t.shape[1]],
    "expanded": lambda t: t[:1].expand(t.shape),
    "expanded channels": lambda t: t[:, :1].expand(t.shape),
    "transposed": lambda t: t.transpose(-1, 0).contiguous().transpose(-1, 0),
}


class Call(NamedTuple):
    dtype: torch.dtype
    x_shape: tuple[int, ...]
    w_shape: tuple[int, ...]
    layouts: tuple[str, str, str]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    def results(self):
        """Return the output and the gradients of input, weight and bias."""
        torch.manual_seed(0)
        x, w = (
            LAYOUTS[layout](torch.randn(shape, dtype=torch.float64).to(self.dtype)).requires_grad_()
            for shape, layout in zip((self.x_shape, self.w_shape), self.layouts, strict=False)
        )
        b = torch.randn(w.shape[1] * self.groups if self.transposed else w.shape[0]).to(self.dtype).requires_grad_()
        y = torch.convolution(x, w, b, *self[4:])
        grad = LAYOUTS[self.layouts[2]](torch.randn(y.shape, dtype=torch.float64).to(self.dtype))
        return y, *torch.autograd.grad(y, (x, w, b), grad)


@st.composite
def calls(draw):
    dimensions, groups, transposed = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.booleans())
    dtype = draw(st.sampled_from([*HALVES, torch.float32, torch.float64]))
    few, filters = st.integers(1, 2), draw(st.sampled_from([st.just(1), st.integers(1, 3)]))
    kernel, spatial = ([draw(each) for _ in range(dimensions)] for each in (filters, st.integers(1, 4)))
    stride = draw(few)
    dilation = 1 if dtype in HALVES else draw(few)  # PyTorch 2.13 ends the process in some dilated gradients of 16 bits
    padding = draw(st.integers(0, 2))
    more = draw(st.integers(0, 1)) if transposed and stride > 1 else 0
    reach = [dilation * (k - 1) + 1 for k in kernel]
    if transposed:
        spatial = [max(n, 1 - (-(2 * padding + 1 - r - more) // stride)) for n, r in zip(spatial, reach, strict=True)]
    else:
        spatial = [max(n, r - 2 * padding) for n, r in zip(spatial, reach, strict=True)]
    channels, filters = groups * draw(few), groups * draw(few)
    w_shape = (channels, filters // groups) if transposed else (filters, channels // groups)
    return Call(
        dtype,
        (draw(st.sampled_from([1, 2, 17])), channels, *spatial),
        (*w_shape, *kernel),
        tuple(draw(st.sampled_from([*LAYOUTS])) for _ in range(3)),
        *([each] * dimensions for each in (stride, padding, dilation)),
        transposed,
        [more] * dimensions,
        groups,
    )


@given(calls())
def test_strides_are_pytorchs(call):
    try:
        expected = call.results()
    except RuntimeError as error:  # PyTorch 2.13 lacks some gradients of its own: "grad_weight must be contiguous"
        if "must be contiguous" not in str(error):
            raise
        return
    with enable_on_cpu() as on:
        found = call.results()
        by_pytorch = call.dtype is torch.bfloat16  # which the CPU backend does not compute
        assert (on.report().calls, bool(on.report().left)) == ((0, True) if by_pytorch else (3, False))
    assert [each.stride() for each in found] == [each.stride() for each in expected], call
    if call.dtype is torch.float64:
        torch.testing.assert_close(found, expected)
