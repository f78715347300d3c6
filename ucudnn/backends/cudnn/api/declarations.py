"""The functions of libcudnn that ucudnn calls, with one letter for each argument.

p is an address (of a descriptor, of device memory, of a host scalar or array), i is an int or an enumeration, l an
int64, u an unsigned int64, z a size_t, f a float, d a double. A capital letter is an output of that type, which the
caller does not pass. All functions return a status. {kind} and {operation} stand for each kind of descriptors and each
operation of convolutions, whose functions take the same.
"""

from ucudnn.problem import Operation

_TEXT = """
cudnnCreate P
cudnnDestroy p
cudnnSetStream pp
cudnnGetStream pP
cudnnQueryRuntimeError pIip
cudnnBackendCreateDescriptor iP
cudnnBackendDestroyDescriptor p
cudnnBackendFinalize p
cudnnBackendSetAttribute piilp
cudnnBackendGetAttribute piilLp
cudnnBackendExecute ppp
cudnnCreate{kind}Descriptor P
cudnnDestroy{kind}Descriptor p
cudnnSetTensor4dDescriptor piiiiii
cudnnSetTensor4dDescriptorEx piiiiiiiii
cudnnGetTensor4dDescriptor pIIIIIIIII
cudnnSetTensorNdDescriptor piipp
cudnnGetTensorNdDescriptor piIIpp
cudnnAddTensor ppppppp
cudnnSetTensor pppp
cudnnScaleTensor pppp
cudnnSetFilter4dDescriptor piiiiii
cudnnSetFilterNdDescriptor piiip
cudnnGetFilterNdDescriptor piIIIp
cudnnSetConvolutionMathType pi
cudnnGetConvolutionMathType pI
cudnnSetConvolutionGroupCount pi
cudnnGetConvolutionGroupCount pI
cudnnSetConvolution2dDescriptor piiiiiiii
cudnnSetConvolutionNdDescriptor pipppii
cudnnGetConvolutionNdDescriptor piIpppII
cudnnGetConvolution{operation}WorkspaceSize pppppiZ
cudnnConvolution{operation} pppppppipzppp
cudnnConvolutionBackwardBias ppppppp
cudnnFindConvolution{operation}Algorithm pppppiIp
cudnnFindConvolution{operation}AlgorithmEx ppppppppiIppz
cudnnGetConvolution{operation}Algorithm_v7 pppppiIp
cudnnSetOpTensorDescriptor piii
cudnnGetOpTensorDescriptor pIII
cudnnOpTensor ppppppppppp
cudnnSetReduceTensorDescriptor piiiii
cudnnGetReduceTensorDescriptor pIIIII
cudnnGetReductionIndicesSize ppppZ
cudnnGetReductionWorkspaceSize ppppZ
cudnnReduceTensor pppzpzpppppp
cudnnSetPooling2dDescriptor piiiiiiii
cudnnSetPoolingNdDescriptor piiippp
cudnnPoolingForward pppppppp
cudnnPoolingBackward pppppppppppp
cudnnDeriveBNTensorDescriptor ppi
cudnnBatchNormalizationForwardTraining pipppppppppdppdpp
cudnnBatchNormalizationForwardInference pipppppppppppd
cudnnBatchNormalizationBackward pippppppppppppppdpp
cudnnBatchNormalizationForwardTrainingEx piippppppppppp dppdppp pzpz
cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize piipppppZ
cudnnBatchNormalizationBackwardEx piipppp pppppppppp ppppp d ppp pzpz
cudnnGetBatchNormalizationBackwardExWorkspaceSize piipppppppZ
cudnnGetBatchNormalizationTrainingExReserveSpaceSize piippZ
cudnnSetActivationDescriptor piid
cudnnSoftmaxForward piipppppp
cudnnSoftmaxBackward piipppppppp
cudnnActivationForward pppppppp
cudnnActivationBackward pppppppppppp
cudnnDropoutGetStatesSize pZ
cudnnSetDropoutDescriptor ppfpzu
cudnnDropoutGetReserveSpaceSize pZ
cudnnDropoutForward pppppppz
cudnnDropoutBackward pppppppz
"""

_KINDS = ("Tensor", "Filter", "Convolution", "OpTensor", "ReduceTensor", "Pooling", "Activation", "Dropout")

DECLARATIONS: dict[str, str] = {
    name.format(kind=kind, operation=operation.value): letters.replace(" ", "")
    for name, _, letters in (line.partition(" ") for line in _TEXT.strip().splitlines())
    for kind in _KINDS
    for operation in Operation
}
"""The letters of each function's arguments, by its name."""
