"""A backend that lists many algorithms, of which it finds the first ones without a list."""

from contextlib import nullcontext

from tests.support.counting_backend import CountingBackend


class Ranked(CountingBackend):
    """Lists algorithms A0, A1, and so on, with given workspaces in bytes.

    Attributes:
        lists: how often the list was asked for.
    """

    def __init__(self, *workspaces):
        super().__init__({f"A{number}": size for number, size in enumerate(workspaces)})
        self.lists, self.lock = 0, nullcontext()

    def algorithms(self, problem):
        self.lists += 1
        return super().algorithms(problem)

    def leading(self, problem, most):
        return super().algorithms(problem)[: min(most, 20)]

    def float32_sum(self, problem):
        return None
