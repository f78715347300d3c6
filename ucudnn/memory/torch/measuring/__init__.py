"""Times and scratch of operations, measured one by one."""
