"""cuDNN on an NVIDIA GPU: engine configurations of its graph API, and the algorithms of `cudnnConvolution*`."""
