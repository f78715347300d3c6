"""The names, parameters and constants of CuPy 13, without cuDNN."""

import inspect
import pickle
import subprocess
import sys

import pytest

from tests.support.cupy_names import CONSTANTS, SIGNATURES
from ucudnn import cudnn
from ucudnn.cudnn import constants
from ucudnn.cudnn.missing import MISSING
from ucudnn.cudnn.signatures import named
from ucudnn.errors import UcudnnError

CONVOLUTION = "pad stride dilation groups *"
LAYOUTS = "auto_tune tensor_core d_layout=0 w_layout=0"
ARRAYS = {
    "convolution_forward": f"x W b y {CONVOLUTION} {LAYOUTS}",
    "convolution_backward_filter": f"x gy gW {CONVOLUTION} deterministic {LAYOUTS}",
    "convolution_backward_data": f"W x b y {CONVOLUTION} deterministic {LAYOUTS}",
    "create_tensor_descriptor": "arr format=0",
    "create_filter_descriptor": "arr format=0",
    "create_convolution_descriptor": "pad stride dtype mode=1 dilation=None use_tensor_core=False groups=1",
    "get_data_type": "dtype",
    "get_handle": "",
    "get_max_workspace_size": "",
    "reset_handles": "",
    "set_max_workspace_size": "size",
}


def test_functions_have_cupys_parameters():
    for name, expected in SIGNATURES.items():
        function = getattr(cudnn, name)
        parameters = inspect.signature(function).parameters.values()
        assert [each.name for each in parameters] == expected, name
        assert {each.kind for each in parameters} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}, name
        assert function.__name__ == name
        assert inspect.getdoc(function), name
    for name, expected in ARRAYS.items():
        text = []
        for each in inspect.signature(getattr(cudnn, name)).parameters.values():
            if each.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in text:
                text.append("*")
            text.append(each.name + ("" if each.default is inspect.Parameter.empty else f"={each.default}"))
        assert text == expected.split(), name


def test_constants_are_those_of_cupy_and_plain_ints():
    there = {name for name in vars(constants) if name.startswith("CUDNN_")}
    more = "BN_MIN_EPSILON CONVOLUTION_BWD_FILTER_ALGO_FFT_TILING DATA_BFLOAT16 FMA_MATH STATUS_BAD_PARAM"
    more += " STATUS_NOT_SUPPORTED TENSOR_OP_MATH_ALLOW_CONVERSION"
    assert len(CONSTANTS) == 195
    assert there - CONSTANTS == {f"CUDNN_{name}" for name in more.split()}
    assert {type(getattr(cudnn, name)) for name in CONSTANTS} == {int}
    chosen = ("DATA_FLOAT", "DATA_DOUBLE", "DATA_HALF", "DATA_BFLOAT16", "TENSOR_NHWC", "CROSS_CORRELATION", "FMA_MATH")
    assert [getattr(cudnn, f"CUDNN_{name}") for name in chosen] == [0, 1, 2, 9, 1, 1, 3]


def test_a_name_that_the_package_lacks_is_explained():
    for name in MISSING:
        words = f"has no attribute '{name}': .*(not part of it|the convolutions on arrays)"
        with pytest.raises(AttributeError, match=words):
            getattr(cudnn, name)
    with pytest.raises(AttributeError, match=r"'ucudnn\.cudnn' has no attribute 'cudnnCreate'$"):
        _ = cudnn.cudnnCreate


def test_every_public_name_is_cupys_or_documented_as_ours():
    functions = {name for name, value in vars(cudnn).items() if callable(value) and not name.startswith("_")}
    classes = {"CuDNNAlgoPerf", "CuDNNError", "Descriptor"}
    assert functions - {"adopt", "report"} == set(SIGNATURES) | set(ARRAYS) | classes
    assert "Only `adopt` and `report` are not CuPy's" in " ".join(cudnn.__doc__.split())


def test_import_is_light():
    code = "import sys, ucudnn.cudnn; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "ucudnn.cudnn.passthrough" in modules
    assert set(modules) & {"numpy", "cupy", "ctypes", "ucudnn.backends.cudnn.api.library"} == set()


def test_errors_can_be_pickled_with_their_infos():
    error = cudnn.CuDNNError(3000, "CUDNN_STATUS_NOT_SUPPORTED")
    error.add_info("func: cudnnConvolutionForward")
    error.add_infos(["x: float32", "y: float32"])
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, RuntimeError)
    assert isinstance(copy, UcudnnError)
    assert copy.status == 3000
    text = "cuDNN Error: CUDNN_STATUS_NOT_SUPPORTED\n  func: cudnnConvolutionForward\n  x: float32\n  y: float32"
    assert str(copy) == str(error) == text


def test_check_status():
    cudnn.check_status(cudnn.CUDNN_STATUS_SUCCESS)
    with pytest.raises(cudnn.CuDNNError, match=r"cuDNN Error: (CUDNN_STATUS_BAD_PARAM|2000)") as caught:
        cudnn.check_status(cudnn.CUDNN_STATUS_BAD_PARAM)
    assert caught.value.status == 2000


def test_named_functions_take_positions_and_keywords():
    function = named("f(first second)", lambda *arguments: arguments, "Return them.")
    assert function(1, 2) == function(1, second=2) == function(second=2, first=1) == (1, 2)
    for arguments, keywords, message in (
        ((1,), {}, r"f\(first, second\): missing a required argument: 'second'"),
        ((1, 2), {"third": 3}, r"f\(first, second\): got an unexpected keyword argument 'third'"),
        ((1, 2, 3), {}, "too many positional arguments"),
    ):
        with pytest.raises(TypeError, match=message):
            function(*arguments, **keywords)
