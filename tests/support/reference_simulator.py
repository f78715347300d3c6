"""A slow simulator of plans, written the other way round: a state from which everything is counted anew at each event.

It knows chunks of memory, each with the storage that it holds, and two lists of copies that point to chunks. Numbers
are fractions, so there is no rounding, and what ends at one instant ends together, before the next action is issued.
`ucudnn.memory.simulation` must find the same.
"""

from fractions import Fraction

from ucudnn.memory.plans.actions import ActionKind
from ucudnn.memory.simulation.result import Queue


class OutOfMemoryError(Exception):
    """The cap is exceeded and no copy would free anything."""


class ReferenceSimulator:
    """Simulates a plan; read the attributes after `run`."""

    def __init__(self, plan, costs, cap=None):
        self.plan, self.graph, self.costs, self.cap = plan, plan.graph, costs, cap
        self.time = Fraction(0)
        self.chunks = []  # dictionaries: storage, bytes, version, freed
        self.latest = {}  # the chunk that a storage had last
        self.out, self.back = [], []  # dictionaries: storage, action, left, begun, chunk
        self.beside = []  # collectives: dictionaries: operation, action, left, begun, chunks of operands
        self.operation = None  # a dictionary: left, action, begun, passing
        self.next = 0
        self.peak = self.fixed = self.fixed_bytes()
        self.spent = dict.fromkeys(("work", "contention", "wait", "memory"), Fraction(0))
        self.timeline = []
        self.memory = {}  # bytes that exist from a time on
        self.pinned_peak = 0
        self.offloaded = self.prefetched = 0
        self.versions = {s: 0 for s, exists in enumerate(self.graph.exists_before) if exists}
        self.fixed_storages = set(self.versions)

    def fixed_bytes(self):
        before = zip(self.graph.sizes, self.graph.exists_before, strict=True)
        return sum(self.rounded(size) for size, exists in before if exists)

    def rounded(self, size):
        step = self.costs.granularity
        return (size + step - 1) // step * step

    def live(self):
        passing = self.operation["passing"] if self.operation else 0
        return self.fixed + sum(chunk["bytes"] for chunk in self.chunks) + passing

    def chunk_of(self, storage):
        found = [chunk for chunk in self.chunks if chunk["storage"] == storage and not chunk["freed"]]
        assert len(found) <= 1
        return found[0] if found else None

    def run(self):
        while self.operation or self.out or self.back or self.beside or self.next < len(self.plan.actions):
            blocked = self.issue()
            self.sweep()
            self.note_memory()
            if self.operation or self.out or self.back or self.beside:
                self.advance(blocked)
        return self

    def note_memory(self):
        self.memory[self.time] = self.live()
        self.peak = max(self.peak, self.live())

    def issue(self):
        """Issue actions until one blocks; return why: 'wait' or 'memory'."""
        while not self.operation and self.next < len(self.plan.actions):
            kind, target = self.plan.actions[self.next]
            blocked = getattr(self, f"issue_{kind.value}")(target)
            if blocked:
                return blocked
            self.next += 1
            self.sweep()
            self.note_memory()
        return "wait"

    def issue_run(self, target, again=False):
        operation = self.graph.operations[target]
        if self.awaits({*operation.reads, *operation.writes}, operation.writes):
            return "wait"
        operands = self.operands_beside(target)
        if any(self.is_read(chunk) for chunk in operands or ()):
            return "wait"
        return self.begin(operation, target, operands, again=again)

    def begin(self, operation, target, operands, *, again):
        """Begin an operation whose operands are there; return why it cannot."""
        born, passing = [], self.rounded(self.costs.scratch_bytes[target])
        for storage in operation.writes:
            version = 1 + self.graph.writers[storage].index(target)
            if storage in self.fixed_storages:
                if again and storage not in operation.reads:
                    passing += self.rounded(self.graph.sizes[storage])
                continue
            chunk = self.chunk_of(storage)
            if not chunk:
                born.append((storage, version))
            elif again and chunk["version"] >= version and storage not in operation.reads:
                passing += self.rounded(self.graph.sizes[storage])
        blocked = self.full(passing + sum(self.rounded(self.graph.sizes[storage]) for storage, _ in born))
        if blocked:
            return blocked
        for storage, version in born:
            self.chunks.append(self.chunk(storage, version))
        for storage in operation.writes:
            chunk = self.chunk_of(storage)
            if chunk:
                chunk["version"] = max(chunk["version"], 1 + self.graph.writers[storage].index(target))
        left = Fraction(self.costs.time_ms[target])
        self.operation = {"left": left, "action": self.next, "begun": self.time, "passing": passing}
        beside = {"operation": operation, "action": self.next, "left": left, "begun": None, "chunks": operands}
        self.operation |= {} if operands is None else {"left": Fraction(0), "beside": beside}
        return None

    def operands_beside(self, target):
        """Return the chunks of operands of an operation that runs beside compute; None of any other one."""
        if not self.plan.overlapped or target not in self.graph.collectives:
            return None
        reads = self.graph.operations[target].reads
        return [self.chunk_of(storage) for storage in reads if not self.graph.exists_after[storage]]

    def awaits(self, accessed, written=()):
        """Whether a collective runs whose results are accessed, or whose operands are written."""
        running = [each["operation"] for each in self.beside]
        return any({*accessed} & {*each.writes} or {*written} & {*each.reads} for each in running)

    def is_read(self, chunk):
        """Whether a copy or a collective still reads a chunk."""
        return any(copy["chunk"] is chunk for copy in self.out) or any(
            own is chunk for each in self.beside for own in each["chunks"]
        )

    def issue_recompute(self, target):
        return self.issue_run(target, again=True)

    def issue_offload(self, storage):
        if self.awaits([storage], [storage]):
            return "wait"
        size = self.graph.sizes[storage]
        left = Fraction(size) / Fraction(self.costs.offload_bytes_per_ms)
        chunk = self.chunk_of(storage)
        self.out.append({"storage": storage, "action": self.next, "left": left, "begun": None, "chunk": chunk})
        chunk["on_host"] = chunk["version"]
        self.versions[storage] = chunk["version"]
        self.offloaded += size
        self.count_pinned()
        return None

    def issue_prefetch(self, storage):
        if self.awaits([storage], [storage]):
            return "wait"
        size = self.graph.sizes[storage]
        self.sweep()
        latest = self.latest.get(storage)
        if any(chunk is latest for chunk in self.chunks):
            latest.update(version=self.versions[storage], freed=False)
        else:
            blocked = self.full(self.rounded(size))
            if blocked:
                return blocked
            self.chunks.append(self.chunk(storage, self.versions[storage]))
        left = Fraction(size) / Fraction(self.costs.prefetch_bytes_per_ms)
        self.back.append({"storage": storage, "action": self.next, "left": left, "begun": None})
        self.prefetched += size
        return None

    def issue_free(self, storage):
        chunk = self.chunk_of(storage)
        holding = [each["chunks"] for each in self.beside if any(own is chunk for own in each["chunks"])]
        if self.awaits([storage]) or any(own["freed"] for chunks in holding for own in chunks):
            return "wait"
        chunk["freed"] = True
        return None

    def issue_wait(self, storage):
        copied = any(copy["storage"] == storage for copy in self.out + self.back)
        return "wait" if copied or self.awaits([storage], [storage]) else None

    def issue_synchronize(self, _):
        return "wait" if self.out or self.back or self.beside else None

    def chunk(self, storage, version):
        size = self.rounded(self.graph.sizes[storage])
        self.latest[storage] = {"storage": storage, "bytes": size, "version": version, "freed": False}
        return self.latest[storage]

    def full(self, needed):
        self.sweep()
        if self.cap is None or not needed or self.live() + needed <= self.cap:
            return None
        if not any(chunk["freed"] for chunk in self.chunks):
            raise OutOfMemoryError
        return "memory"

    def sweep(self):
        """Drop the chunks that are freed and that no copy reads any more."""
        self.chunks = [chunk for chunk in self.chunks if not chunk["freed"] or self.is_read(chunk)]

    def count_pinned(self):
        """Count the host's copies: each from its offload to the end of the last prefetch that wants it."""
        held = {}
        actions = self.plan.actions
        for index, (kind, storage) in enumerate(actions[: self.next + 1]):
            if kind is ActionKind.OFFLOAD:
                later = [i for i in range(index + 1, len(actions)) if actions[i] == (ActionKind.OFFLOAD, storage)]
                until = later[0] if later else len(actions)
                wanting = [i for i in range(index, until) if actions[i] == (ActionKind.PREFETCH, storage)]
                issued = wanting and wanting[-1] < self.next
                arrives = wanting and any(copy["action"] == wanting[-1] for copy in self.back)
                held[storage] = not issued or arrives
        self.pinned_peak = max(self.pinned_peak, sum(self.graph.sizes[each] for each in held if held[each]))

    def advance(self, blocked):
        """Let time pass until the next end of anything."""
        out = self.out[:1]
        leaving = [copy["storage"] for copy in self.out]
        back = [copy for copy in self.back[:1] if copy["storage"] not in leaving]
        beside = self.beside[:1]
        for copy in out + back + beside:
            copy["begun"] = self.time if copy["begun"] is None else copy["begun"]
        copy_rate = Fraction(self.costs.duplex) if out and back else Fraction(1)
        compute_rate = 1 / Fraction(self.costs.contention) if out or back else Fraction(1)
        ends = [copy["left"] / copy_rate for copy in out + back] + [each["left"] for each in beside]
        if self.operation:
            ends.append(self.operation["left"] / compute_rate)
        step = min(ends)
        self.time += step
        for copy in out + back:
            copy["left"] -= step * copy_rate
        for each in beside:
            each["left"] -= step
        if self.operation:
            self.operation["left"] -= step * compute_rate
            self.spent["work"] += step * compute_rate
            self.spent["contention"] += step - step * compute_rate
        else:
            self.spent[blocked] += step
        self.end(out, back, beside)

    def end(self, out, back, beside):
        lanes = (out, self.out, Queue.TO_HOST), (back, self.back, Queue.FROM_HOST), (beside, self.beside, Queue.RANKS)
        for running, copies, queue in lanes:
            if running and not running[0]["left"]:
                copy = copies.pop(0)
                self.timeline.append((queue, copy["action"], copy["begun"], self.time))
        if self.operation and not self.operation["left"]:
            if self.time > self.operation["begun"]:
                self.timeline.append((Queue.COMPUTE, self.operation["action"], self.operation["begun"], self.time))
            if "beside" in self.operation:
                self.beside.append(self.operation["beside"])
            self.operation = None
