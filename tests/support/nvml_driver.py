"""A stand-in for NVML, the library of NVIDIA's driver that tells the state of a GPU."""


class NvmlDriver:
    """A driver of one GPU, GPU-0123, which may refuse.

    Args:
        refuses: what it refuses: 'init', 'handle' or what a subclass names; nothing if it is empty.

    Attributes:
        open: how often it was opened and not closed since.
    """

    def __init__(self, refuses=""):
        self.refuses, self.open = refuses, 0

    def nvmlInit_v2(self):  # noqa: N802
        if self.refuses == "init":
            return 1
        self.open += 1
        return 0

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, name, handle):  # noqa: N802
        assert name == b"GPU-0123"
        return int(self.refuses == "handle")
