"""The values of cuDNN's enumerations that convolutions need, under the names of cudnn_graph.h."""

from enum import IntEnum

from ucudnn.problem import DataType

DATA_FLOAT, DATA_DOUBLE, DATA_HALF, DATA_BFLOAT16 = 0, 1, 2, 9
"""cudnnDataType_t."""

DATA_TYPES: dict[DataType, int] = {
    DataType.FLOAT32: DATA_FLOAT,
    DataType.FLOAT64: DATA_DOUBLE,
    DataType.FLOAT16: DATA_HALF,
    DataType.BFLOAT16: DATA_BFLOAT16,
}
"""cudnnDataType_t of the data types that a problem can have."""

TENSOR_NCHW, TENSOR_NHWC = 0, 1
"""cudnnTensorFormat_t."""

DEFAULT_MATH, TENSOR_OP_MATH, FMA_MATH = 0, 1, 3
"""cudnnMathType_t."""

CROSS_CORRELATION = 1
"""cudnnConvolutionMode_t: convolutions of deep learning do not flip their filters."""

ALLOCATION_FAILURES = (4003, 4004)
"""cudnnStatus_t: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED and ..._DEVICE_ALLOCATION_FAILED."""

POINTWISE_ADD = 0
"""cudnnPointwiseMode_t: an operation of the graph API that adds two tensors; the smaller one is repeated."""

RUNTIME_COMPILATION = 0
"""cudnnBackendBehaviorNote_t: building a plan compiles kernels, which takes 0.3 to 0.6 s each on a server of 2025."""


class DescriptorType(IntEnum):
    """cudnnBackendDescriptorType_t."""

    POINTWISE = 0
    CONVOLUTION = 1
    ENGINE = 2
    ENGINECFG = 3
    ENGINEHEUR = 4
    EXECUTION_PLAN = 5
    KNOB_CHOICE = 7
    FORWARD = 10
    BACKWARD_FILTER = 11
    BACKWARD_DATA = 12
    OPERATION_POINTWISE = 13
    OPERATIONGRAPH = 15
    VARIANT_PACK = 16
    TENSOR = 17


class Type(IntEnum):
    """cudnnBackendAttributeType_t."""

    HANDLE = 0
    DATA_TYPE = 1
    BOOLEAN = 2
    INT64 = 3
    FLOAT = 4
    DOUBLE = 5
    VOID_PTR = 6
    CONVOLUTION_MODE = 7
    HEUR_MODE = 8
    KNOB_TYPE = 9
    NUMERICAL_NOTE = 11
    POINTWISE_MODE = 14
    DESCRIPTOR = 15
    BEHAVIOR_NOTE = 19


class Attribute(IntEnum):
    """cudnnBackendAttributeName_t."""

    POINTWISE_MODE = 0
    POINTWISE_MATH_PREC = 1
    CONVOLUTION_COMP_TYPE = 100
    CONVOLUTION_CONV_MODE = 101
    CONVOLUTION_DILATIONS = 102
    CONVOLUTION_FILTER_STRIDES = 103
    CONVOLUTION_POST_PADDINGS = 104
    CONVOLUTION_PRE_PADDINGS = 105
    CONVOLUTION_SPATIAL_DIMS = 106
    ENGINEHEUR_MODE = 200
    ENGINEHEUR_OPERATION_GRAPH = 201
    ENGINEHEUR_RESULTS = 202
    ENGINECFG_ENGINE = 300
    ENGINECFG_KNOB_CHOICES = 302
    ENGINECFG_WORKSPACE_SIZE = 303
    EXECUTION_PLAN_HANDLE = 400
    EXECUTION_PLAN_ENGINE_CONFIG = 401
    EXECUTION_PLAN_WORKSPACE_SIZE = 402
    KNOB_CHOICE_KNOB_TYPE = 600
    KNOB_CHOICE_KNOB_VALUE = 601
    FORWARD_ALPHA = 700
    BACKWARD_DATA_ALPHA = 706
    BACKWARD_FILTER_ALPHA = 712
    OPERATION_POINTWISE_PW_DESCRIPTOR = 750
    OPERATION_POINTWISE_XDESC = 751
    OPERATION_POINTWISE_BDESC = 752
    OPERATION_POINTWISE_YDESC = 753
    OPERATIONGRAPH_HANDLE = 800
    OPERATIONGRAPH_OPS = 801
    TENSOR_BYTE_ALIGNMENT = 900
    TENSOR_DATA_TYPE = 901
    TENSOR_DIMENSIONS = 902
    TENSOR_STRIDES = 903
    TENSOR_UNIQUE_ID = 906
    TENSOR_IS_VIRTUAL = 907
    VARIANT_PACK_UNIQUE_IDS = 1000
    VARIANT_PACK_DATA_POINTERS = 1001
    VARIANT_PACK_WORKSPACE = 1003
    ENGINE_OPERATION_GRAPH = 1300
    ENGINE_GLOBAL_INDEX = 1301
    ENGINE_NUMERICAL_NOTE = 1303
    ENGINE_BEHAVIOR_NOTE = 1305


class HeuristicMode(IntEnum):
    """cudnnBackendHeurMode_t: A is a decision tree, B is a neural network, FALLBACK lists engines that always work."""

    A = 3
    B = 1
    FALLBACK = 2


class NumericalNote(IntEnum):
    """cudnnBackendNumericalNote_t: numerical properties of an engine."""

    TENSOR_CORE = 0
    DOWN_CONVERT_INPUTS = 1
    REDUCED_PRECISION_REDUCTION = 2
    FFT = 3
    NONDETERMINISTIC = 4
    WINOGRAD = 5
    WINOGRAD_TILE_4X4 = 6
    WINOGRAD_TILE_6X6 = 7
    WINOGRAD_TILE_13X13 = 8
    STRICT_NAN_PROP = 9
