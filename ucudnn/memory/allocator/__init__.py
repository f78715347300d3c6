"""PyTorch's allocator: what it takes for a plan, and one block of it in which storages lie and move."""
