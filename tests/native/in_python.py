"""A Python process calls the C interface, so its own interpreter plans. Arguments: the two libraries."""

import ctypes
import sys

import numpy as np

stub = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
native = ctypes.CDLL(sys.argv[2])

P, INT = ctypes.c_void_p, ctypes.c_int


def made(function, *arguments):
    found = P()
    assert function(*arguments, ctypes.byref(found)) == 0
    return found


def ints(*values):
    return (INT * len(values))(*values)


class Descriptors(ctypes.Structure):
    _fields_ = (("x", P), ("w", P), ("convolution", P), ("y", P))


class Plain(ctypes.Structure):
    _fields_ = (("algorithm", INT), ("workspace", P), ("workspace_bytes", ctypes.c_size_t))


native.ucudnn_register.argtypes = (P, INT, P, ctypes.c_int64)
native.ucudnn_convolve.argtypes = (P, INT, P, P, P, P, P, P, P)
handle = made(native.ucudnn_create)
x, y = made(stub.cudnnCreateTensorDescriptor), made(stub.cudnnCreateTensorDescriptor)
w, convolution = made(stub.cudnnCreateFilterDescriptor), made(stub.cudnnCreateConvolutionDescriptor)
stub.cudnnSetTensorNdDescriptor(x, 0, 4, ints(4, 2, 5, 5), ints(50, 25, 5, 1))
stub.cudnnSetTensorNdDescriptor(y, 0, 4, ints(4, 3, 5, 5), ints(75, 25, 5, 1))
stub.cudnnSetFilterNdDescriptor(w, 0, 0, 4, ints(3, 2, 1, 1))
stub.cudnnSetConvolutionNdDescriptor(convolution, 2, ints(0, 0), ints(1, 1), ints(1, 1), 1, 0)
asked = Descriptors(x, w, convolution, y)
assert native.ucudnn_register(handle, 0, ctypes.byref(asked), 500) == 1

rng = np.random.default_rng()
values = {"x": rng.random((4, 2, 5, 5), np.float32), "w": rng.random((3, 2, 1, 1), np.float32)}
values["y"] = np.full((4, 3, 5, 5), np.nan, np.float32)
one, zero, plain = ctypes.c_float(1), ctypes.c_float(0), Plain()
at = [values[name].ctypes.data for name in "xwy"]
status = native.ucudnn_convolve(
    handle, 0, ctypes.byref(asked), ctypes.byref(one), *at, ctypes.byref(zero), ctypes.byref(plain)
)
assert status == 0
np.testing.assert_allclose(values["y"], np.einsum("nchw,kc->nkhw", values["x"], values["w"][:, :, 0, 0]), rtol=1e-5)
assert "ucudnn.native.bridge" in sys.modules  # this interpreter planned
if len(sys.argv) > 3:
    native.ucudnn_destroy(handle)  # else the handle outlives Python
sys.stdout.write("computed\n")
