"""What a process has on a device: its allocator, blocks of memory, copies, and the stated budget."""
