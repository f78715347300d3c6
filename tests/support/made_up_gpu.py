"""A GPU as trials see it that a test makes up: its clock goes as the test says, and its marks are read steps later."""


class MadeUpGpu:
    """What a tuner asks of the device of a program.

    Attributes:
        now: milliseconds of its clock.
        step: number of the step that runs.
        late: steps after which a mark can be read.
    """

    can_delay = False

    def __init__(self, late=0):
        self.now, self.step, self.late = 0.0, 0, late

    def mark(self):
        return self.now, self.step

    def elapsed_ms(self, begin, end):
        return end[0] - begin[0] if self.step >= end[1] + self.late else None

    def has_reached(self, mark):
        return False

    def issue_ms(self, begin, end):
        return 0.0

    def live_bytes(self):
        return 0

    def peak_bytes(self):
        return (1 + min(self.step, 3)) << 30

    def reserved_bytes(self):
        return 1 << 30

    def bytes_per_ms(self):
        return 0.0

    def was_away(self):
        return False
