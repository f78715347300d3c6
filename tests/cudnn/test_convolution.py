"""Convolutions through CuPy's names on host memory, with cuDNN's descriptors and the CPU's algorithms."""

import logging

import numpy as np
import pytest

from tests.support.address_backend import AddressBackend, DeviceArray
from tests.support.reference import WRITTEN, reference_convolution
from ucudnn import Handle, cudnn
from ucudnn.cudnn import cupyx_functions
from ucudnn.cudnn.handles import MicroHandle, micro_handle
from ucudnn.errors import BackendError
from ucudnn.problem import Operation

KIB = 2**10
FORWARD, DATA, FILTER = Operation.FORWARD, Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER


FIND, FIND_EX = "findConvolution{}Algorithm", "findConvolution{}AlgorithmEx"
GET_V6, GET_V7, GET_SIZE = (f"getConvolution{{}}{name}" for name in ("Algorithm_v6", "Algorithm_v7", "WorkspaceSize"))


def function(operation, form):
    return getattr(cudnn, form.format(operation.value))


def find_ex(operation, layer, handle, count, size, form=FIND_EX + "_v7"):
    first, second, convolution, written = layer.descriptors(operation)
    return function(operation, form)(handle, first, 0, second, 0, convolution, written, 0, count, 0, size)


@pytest.fixture
def opened():
    """Return a maker of handles with the environment's limit, as `create` makes them on a GPU."""
    made = []

    def make(handle=None, fixed=False):
        micro = MicroHandle(handle or Handle(backend=AddressBackend()), fixed=fixed)
        cudnn.handles._HANDLES[micro.address] = micro
        made.append(micro.address)
        return micro

    yield make
    for address in made:
        cudnn.destroy(address)


def problem_of(micro, layer, operation=FORWARD):
    return micro.described(operation, layer.x, layer.w, layer.convolution, layer.y).problem


def calls_of(handle):
    return [kernel.calls for kernel in handle.report().kernels]


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"stride": 2, "groups": 2},
        {"dtype": "float64", "kernel": (5, 3), "pad": 2},
        {"x": (7, 3, 6, 6), "kernel": (1, 1), "pad": 0},
    ],
    ids=["plain", "groups", "double", "odd"],
)
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (0.5, 1.0), (-2.0, 0.25)])
def test_results_are_those_of_the_convolution(opened, layer, operation, sizes, alpha, beta):
    micro, layer = opened(), layer(**sizes)
    problem, written = problem_of(micro, layer, operation), WRITTEN[operation]
    held = {name: each.astype(np.float64) for name, each in layer.arrays.items()}
    expected = alpha * reference_convolution(problem, **held) + beta * held[written]
    if beta == 0:
        layer.arrays[written].fill(np.nan)
    layer.run(micro.address, operation, alpha=alpha, beta=beta)
    tolerance = 1e-10 if problem.dtype.itemsize == 8 else 1e-4
    np.testing.assert_allclose(layer.arrays[written], expected, atol=tolerance * np.abs(expected).max())
    for name in set("xwy") - {written}:
        np.testing.assert_array_equal(layer.arrays[name], held[name])


def test_a_descriptor_that_was_set_anew_changes_the_problem(opened, layer):
    micro, layer = opened(), layer()
    layer.run(micro.address, FORWARD)
    whole = layer.arrays["y"].copy()
    layer.arrays["y"].fill(7)
    cudnn.setTensor4dDescriptor(layer.x, 0, 0, 5, *layer.arrays["x"].shape[1:])
    cudnn.setTensor4dDescriptor(layer.y, 0, 0, 5, *layer.arrays["y"].shape[1:])
    layer.run(micro.address, FORWARD)
    np.testing.assert_allclose(layer.arrays["y"][:5], whole[:5], rtol=1e-4, atol=1e-5)
    assert (layer.arrays["y"][5:] == 7).all()


@pytest.mark.parametrize("operation", Operation)
def test_every_form_answers_with_virtual_algorithms(opened, layer, operation):
    micro, layer = opened(), layer()
    cudnn.setConvolutionMathType(layer.convolution, cudnn.CUDNN_TENSOR_OP_MATH)
    descriptors, get_v7 = layer.descriptors(operation), function(operation, GET_V7)
    lists = [
        function(operation, FIND)(micro.address, *descriptors, 2),
        get_v7(micro.address, *descriptors, requestedAlgoCount=2),
        find_ex(operation, layer, micro.address, 2, 64 * KIB, FIND_EX),
        find_ex(operation, layer, micro.address, 2, 64 * KIB, FIND_EX + "_v7"),
        get_v7(micro.address, *descriptors, 8),
    ]
    expected = [
        cudnn.CuDNNAlgoPerf(algo=0, status=0, time=-1.0, memory=0, determinism=0, mathType=1),
        cudnn.CuDNNAlgoPerf(1, 0, -1.0, 0, 1, 1),
    ]
    assert lists == [expected] * 5
    assert get_v7(micro.address, *descriptors, 1) == expected[:1]
    assert function(operation, GET_SIZE)(micro.address, *descriptors, 0) == 0
    assert calls_of(micro.handle) == []
    layer.run(micro.address, operation)
    assert calls_of(micro.handle) == [1]


@pytest.mark.parametrize(
    ("form", "arguments", "message"),
    [
        *((form, (count,), f"requestedAlgoCount is {count}") for form in (FIND, GET_V7) for count in (0, -1)),
        (GET_V6, (3, 0), "preference is 3"),
    ],
)
def test_a_bad_parameter_is_named(opened, layer, form, arguments, message):
    micro, layer = opened(), layer()
    with pytest.raises(cudnn.CuDNNError, match=f"BAD_PARAM from {form.format('Forward')}: {message}") as caught:
        function(FORWARD, form)(micro.address, *layer.descriptors(FORWARD), *arguments)
    assert caught.value.status == cudnn.CUDNN_STATUS_BAD_PARAM


def test_null_scalars_are_an_error(opened, layer):
    micro, layer = opened(), layer()
    arrays = [layer.arrays[name].ctypes.data for name in "xwy"]
    with pytest.raises(cudnn.CuDNNError, match="NULL_POINTER: alpha or beta"):
        cudnn.convolutionForward(
            micro.address, 0, layer.x, arrays[0], layer.w, arrays[1], layer.convolution, 0, 0, 0, 0, layer.y, arrays[2]
        )


@pytest.mark.parametrize("operation", Operation)
def test_a_limit_that_the_caller_states_is_kept(opened, layer, operation, monkeypatch):
    monkeypatch.setenv("UCUDNN_DEFAULT_WORKSPACE_LIMIT", "1MiB")
    micro, layer = opened(), layer(x=(16, 8, 16, 16))
    problem = problem_of(micro, layer, operation)
    assert micro.handle_for(problem) is micro.handle
    find_ex(operation, layer, micro.address, 1, 32 * KIB)
    layer.run(micro.address, operation)
    handle = micro.handle_for(problem)
    assert handle.workspace_bytes <= handle.settings.workspace_limit_bytes == 32 * KIB
    assert micro.handle.report().kernels == ()
    function(operation, GET_V6)(micro.address, *layer.descriptors(operation), 2, 48 * KIB)
    assert micro.handle_for(problem).settings.workspace_limit_bytes == 48 * KIB
    function(operation, GET_V6)(micro.address, *layer.descriptors(operation), 1, 48 * KIB)
    assert micro.handle_for(problem) is micro.handle  # PREFER_FASTEST states none
    assert micro.handle.settings.workspace_limit_bytes == 1024 * KIB


def test_kernels_of_one_limit_share_a_handle(opened, layer):
    micro, layers = opened(), [layer(), layer(filters=3)]
    for each in layers:
        find_ex(FORWARD, each, micro.address, 1, 32 * KIB)
    first, second = (micro.handle_for(problem_of(micro, each)) for each in layers)
    assert first is second


@pytest.mark.parametrize("variable", [None, "UCUDNN_TOTAL_WORKSPACE_SIZE"])
@pytest.mark.parametrize("fixed", [False, True])
def test_no_workspace_is_always_honoured(opened, layer, variable, fixed, monkeypatch):
    if variable:
        monkeypatch.setenv(variable, "1MiB")
    micro, layer = opened(fixed=fixed), layer()
    descriptors = layer.descriptors(FORWARD)
    no_workspace = cudnn.CUDNN_CONVOLUTION_FWD_NO_WORKSPACE
    algo = cudnn.getConvolutionForwardAlgorithm_v6(micro.address, *descriptors, no_workspace, 8 * KIB)
    handle = micro.handle_for(problem_of(micro, layer))
    assert handle is not micro.handle
    layer.run(micro.address, FORWARD, algo=algo)
    assert handle.workspace_bytes == micro.handle.workspace_bytes == 0


def test_a_total_rules_over_limits_of_callers(opened, layer, monkeypatch):
    monkeypatch.setenv("UCUDNN_TOTAL_WORKSPACE_SIZE", "256KiB")
    micro, layer = opened(), layer()
    for operation in Operation:
        find_ex(operation, layer, micro.address, 1, 16 * KIB)
        assert micro.handle_for(problem_of(micro, layer, operation)) is micro.handle
    for operation in Operation:
        layer.run(micro.address, operation)
    assert calls_of(micro.handle) == [1, 1, 1]
    assert micro.handle.workspace_bytes <= 256 * KIB


def test_the_limit_of_an_adopted_handle_rules(layer):
    handle = Handle(backend=AddressBackend(), workspace_limit="64KiB")
    address = cudnn.adopt(handle)
    layer = layer()
    find_ex(FORWARD, layer, address, 1, 16 * KIB)
    layer.run(address, FORWARD)
    assert calls_of(handle) == [1]
    cudnn.destroy(address)
    assert micro_handle(address) is None
    layer.run(cudnn.adopt(handle), FORWARD)  # the handle outlives its address
    assert calls_of(handle) == [2]
    cudnn.destroy(address)


def test_a_handle_that_does_not_compute_with_cudnn_cannot_be_adopted():
    with pytest.raises(BackendError, match="backend cpu has no cuDNN handle: open a Handle on 'cudnn'"):
        cudnn.adopt(Handle(backend="cpu"))


@pytest.mark.parametrize(("operation", "algo"), [*((each, algo) for each in Operation for algo in (0, 1)), (FILTER, 3)])
def test_numbers_of_deterministic_algorithms_request_determinism(opened, layer, operation, algo):
    micro, layer, deterministic = opened(), layer(), algo == 1
    layer.run(micro.address, operation, algo=algo)
    problems = [entry.kernel.problem for entry in micro.handle._entries.values()]
    assert [problem.deterministic for problem in problems] == [deterministic]


def test_a_stream_stays_until_a_function_computes(opened, layer):
    micro, layer = opened(), layer()
    streams = micro.handle.backend.streams
    cudnn.setStream(micro.address, 77)
    find_ex(FORWARD, layer, micro.address, 1, 32 * KIB)
    assert streams == [77]
    for _ in range(2):
        layer.run(micro.address, FORWARD)
        assert streams == [77, None]


def test_calls_left_to_cudnn_are_counted_and_logged_once(opened, layer, caplog):
    micro, layer = opened(), layer()
    cudnn.setConvolution2dDescriptor_v5(layer.convolution, 1, 1, 1, 1, 1, 1, cudnn.CUDNN_CONVOLUTION, 0)
    with caplog.at_level(logging.WARNING, "ucudnn"):
        for _ in range(3):
            assert micro.described(FORWARD, layer.x, layer.w, layer.convolution, layer.y) is None
    assert list(micro.plain.values()) == [3]
    (record,) = caplog.records
    assert "left to plain cuDNN, not in micro-batches: Forward a convolution that flips" in record.getMessage()


@pytest.fixture
def on_host(opened, monkeypatch):
    """Let the functions on arrays use a handle on host memory, because `get_handle` needs a GPU."""
    micro = opened()
    monkeypatch.setattr(cupyx_functions, "get_handle", lambda: micro.address)
    monkeypatch.setattr(cupyx_functions, "_limit", {})
    return micro


def device(array):
    return np.ascontiguousarray(array).view(DeviceArray)


def forward(x, w, y, *geometry, tensor_core="auto"):
    """Compute y on arrays."""
    geometry = geometry or ((1, 1), (1, 1), (1, 1), 1)
    cudnn.convolution_forward(x, w, None, y, *geometry, auto_tune=False, tensor_core=tensor_core)


@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("operation", Operation)
def test_convolutions_of_arrays(on_host, layer, operation, last):
    layer = layer(groups=2, dtype="float64")
    problem = problem_of(on_host, layer, operation)
    expected = reference_convolution(problem, **layer.arrays)
    x, w, y = (device(np.moveaxis(layer.arrays[name], 1, -1) if last else layer.arrays[name]) for name in "xwy")
    common = ((1, 1), (1, 1), (1, 1), 2)
    keywords = {"auto_tune": False, "tensor_core": "auto", "d_layout": int(last), "w_layout": int(last)}
    {
        FORWARD: lambda: cudnn.convolution_forward(x, w, None, y, *common, **keywords),
        DATA: lambda: cudnn.convolution_backward_data(w, y, None, x, *common, deterministic=True, **keywords),
        FILTER: lambda: cudnn.convolution_backward_filter(x, y, w, *common, deterministic=False, **keywords),
    }[operation]()
    written = {"x": x, "w": w, "y": y}[WRITTEN[operation]]
    np.testing.assert_allclose(np.moveaxis(written, -1, 1) if last else written, expected, atol=1e-10)
    (entry,) = on_host.handle._entries.values()  # the registered kernel is the one that ran
    assert entry.calls == 1
    assert entry.kernel.problem.deterministic == (operation is DATA)


def test_inputs_that_are_not_contiguous_are_copied(on_host, layer):
    layer = layer(dtype="float64")
    x, w, y = (device(layer.arrays[name]) for name in "xwy")
    strange = device(np.moveaxis(x, 1, -1)).transpose(0, 3, 1, 2)
    assert not strange.flags.c_contiguous
    forward(strange, w, y)
    expected = reference_convolution(problem_of(on_host, layer), **layer.arrays)
    np.testing.assert_allclose(y, expected, atol=1e-10)
    with pytest.raises(ValueError, match="not C-contiguous"):
        forward(x, w, y[:, ::2])
    with pytest.raises(ValueError, match="tensor_core is 'maybe'"):
        forward(x, w, y, tensor_core="maybe")


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("wrong", [1.0, "1", None])
def test_parameters_that_are_no_whole_numbers_are_refused_also_after_those_that_they_equal(
    on_host, layer, place, wrong
):
    x, w, y = (device(each) for each in layer().arrays.values())
    geometry = [(1, 1), (1, 1), (1, 1), 1]
    forward(x, w, y, *geometry)
    geometry[place] = wrong if place == 3 else (wrong, 1)
    with pytest.raises(TypeError):
        forward(x, w, y, *geometry)


def test_the_limit_of_arrays(on_host, layer, monkeypatch):
    monkeypatch.setenv("UCUDNN_DEFAULT_WORKSPACE_LIMIT", "3MiB")
    assert cudnn.get_max_workspace_size() == 3 * 2**20
    cudnn.set_max_workspace_size(32 * KIB)
    assert cudnn.get_max_workspace_size() == 32 * KIB
    layer = layer(x=(16, 8, 16, 16))
    x, w, y = (device(layer.arrays[name]) for name in "xwy")
    forward(x, w, y)
    handle = on_host.handle_for(problem_of(on_host, layer))
    assert handle.workspace_bytes <= handle.settings.workspace_limit_bytes == 32 * KIB
