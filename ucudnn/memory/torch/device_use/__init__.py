"""Use of a device and of the host: who has how much memory, how it is taken, and how long steps last."""
