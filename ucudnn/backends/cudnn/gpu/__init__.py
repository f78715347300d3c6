"""The GPU beneath cuDNN: memory, streams, events and kernels of our own."""
