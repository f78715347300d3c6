"""Use of a device: who has how much of its memory, how PyTorch's allocator takes it, and how long steps last."""
