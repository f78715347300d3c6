"""Caffe with plain cuDNN and with `UcudnnHandle_t`."""
