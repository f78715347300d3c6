"""The names of CuPy 13's `cupy.cuda.cudnn` and `cupyx.cudnn` that this package lacks."""

_NAMES = """
CTCLoss RNNBackwardData RNNBackwardDataEx RNNBackwardWeights RNNBackwardWeightsEx RNNForwardInference
RNNForwardInferenceEx RNNForwardTraining RNNForwardTrainingEx activation_backward activation_forward add_tensor
batch_normalization_backward batch_normalization_forward_inference batch_normalization_forward_training
batch_normalization_forward_training_ex createCTCLossDescriptor createFusedOpsConstParamPack createFusedOpsPlan
createFusedOpsVariantParamPack createPersistentRNNPlan createRNNDataDescriptor createRNNDescriptor
createSpatialTransformerDescriptor create_activation_descriptor create_dropout_descriptor create_dropout_states
create_fused_ops_const_param_pack create_fused_ops_plan create_fused_ops_variant_param_pack
create_op_tensor_descriptor create_pooling_descriptor create_reduce_tensor_descriptor create_rnn_descriptor
create_spatial_transformer_descriptor create_tensor_nd_descriptor create_uninitialized_tensor_descriptor ctc_loss
destroyCTCLossDescriptor destroyFusedOpsConstParamPack destroyFusedOpsPlan destroyFusedOpsVariantParamPack
destroyPersistentRNNPlan destroyRNNDataDescriptor destroyRNNDescriptor destroySpatialTransformerDescriptor
fusedOpsExecute fused_ops_execute getCTCLossDescriptor getCTCLossWorkspaceSize getFusedOpsConstParamPackAttribute
getFusedOpsVariantParamPackAttribute getRNNDataDescriptor getRNNLinLayerBiasParams getRNNLinLayerMatrixParams
getRNNPaddingMode getRNNParamsSize getRNNTrainingReserveSize getRNNWorkspaceSize
get_fused_ops_const_param_pack_attribute get_fused_ops_variant_param_pack_attribute get_rnn_lin_layer_bias_params
get_rnn_lin_layer_matrix_params is_tensor_core_available makeFusedOpsPlan make_fused_ops_plan pooling_backward
pooling_forward rnn_backward_data rnn_backward_data_ex rnn_backward_weights rnn_backward_weights_ex
rnn_forward_inference rnn_forward_inference_ex rnn_forward_training rnn_forward_training_ex setCTCLossDescriptor
setFusedOpsConstParamPackAttribute setFusedOpsVariantParamPackAttribute setPersistentRNNPlan setRNNDataDescriptor
setRNNDescriptor_v5 setRNNDescriptor_v6 setRNNPaddingMode setSpatialTransformerDescriptor set_dropout_descriptor
set_fused_ops_const_param_pack_attribute set_fused_ops_variant_param_pack_attribute softmax_backward softmax_forward
spatialTfGridGeneratorBackward spatialTfGridGeneratorForward spatialTfSamplerBackward spatialTfSamplerForward
"""

MISSING = frozenset(_NAMES.split())
"""RNN, CTC loss, spatial transformer and fused operations, and functions of `cupyx.cudnn` other than convolutions."""


def explain(name: str) -> str:
    """Return the error message for a name that this package lacks."""
    text = f"module 'ucudnn.cudnn' has no attribute {name!r}"
    if name not in MISSING:
        return text
    if "_" in name and name.islower():
        return f"{text}: it has only the convolutions on arrays of cupyx.cudnn; for the rest call cuDNN's own functions"
    return (
        f"{text}: CuPy 13's RNN, CTC loss, spatial transformer and fused operations are not part of it;"
        " nvidia-cudnn-frontend or a framework has them"
    )
