"""What was learned about one kernel in the program: times of PyTorch's own, times of candidates, and the choice."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from math import inf
from statistics import median
from typing import final

from ucudnn.configuration import Configuration
from ucudnn.problem import ConvolutionProblem, Operation
from ucudnn.torch.trials.candidate_list import NO_MEMORY, SLOW, WRONG, Candidate, CandidateState, Trial

ENOUGH = 5
"""Samples of a time from which its median counts."""

_MOST_TIMED = 2  # candidates that are timed in the program, the fastest of those that were checked
_MOST_SLOW = 3  # candidates in turn that are not worth timing: the others, which promise less, stay
_MANY, _MOST_OF_MANY = 12, 2  # candidates, of which half may be slow in turn, and three of a kind
_WORTH_TIMING = 1.0  # of PyTorch's time, in the one run beside it
_LONG_MS, _LOADING_MS = 1.0, 10.0  # of PyTorch's time; and by which a first run may take longer, because it loads code
_PROMISING = 0.9  # of PyTorch's time, in that run: it is timed in the program before others are run
_WORTH_ADOPTING = 0.97  # of PyTorch's time: less may be noise
_SHADOW_COST = 3.0  # of PyTorch's time: a run or two, a fill and two norms
_IN_PLACE_COST = 0.1  # of PyTorch's time, at least
_NEAR_FLOOR = 1.25  # of the time in which the GPU reads and writes the tensors at its stated bandwidth
_LEAST_SHARE = 0.003  # of a step's time that a kernel could save, to be worth trying
_COSTLY_SHARE = 0.03  # of a step's time that a kernel could save, to have more candidates
_COSTLIEST = 20  # kernels that have more candidates within a limit, where heuristic plans may be far from the best
_LEAST_GAIN = 0.003  # of a step's time that must be saved in the forward pass, or in the backward pass, to replace any
_LEAST_OF_GAIN = 0.8  # of the time that all adopted kernels save, which a few must save to be compared alone
_MOST_OF_KERNELS = 0.5  # of the adopted kernels, which a few may be
_HOST_MS, _MANY_TIMES = 0.005, 10.0  # by which each kernel of a step may take the host longer on average, or save more
_MOST_SITES = 256


@final
class CallSite:
    """One kernel of the program, for all its layers of one shape.

    Attributes:
        problem: what it computes.
        calls: number of calls in the steps that were watched.
        rank: 0 for the kernel that could save the most time of a step, and so on.
        headroom_bytes: the least workspace for which there is memory at each call.
        floor_ms: time in which the GPU reads and writes its tensors at its stated bandwidth; 0 if that is not known.
        baseline_ms: times of PyTorch's own kernel.
        host_ms: the least milliseconds that the host took to issue it.
        candidates: what may replace it; None if that is not known yet.
        pending: number of times that are not read yet.
        adopted: the candidate that replaces PyTorch's own kernel; None if that stays.
        undivided: the candidate of a single launch that replaces it where launches cost too much; None if that stays.
        finished: whether all is decided.
    """

    def __init__(self, problem: ConvolutionProblem) -> None:
        self.problem = problem
        self.forget()

    def forget(self) -> None:
        """Forget all that was learned."""
        self.calls = self.rank = 0
        self.headroom_bytes: float = inf
        self.floor_ms = 0.0
        self.baseline_ms: list[float] = []
        self.host_ms = inf
        self.candidates: list[Candidate] | None = None
        self.pending = 0
        self.adopted: Candidate | None = None
        self.undivided: Candidate | None = None
        self.finished = False
        self._median = 0, 0.0  # of so many times of PyTorch's own kernel
        self._slow = 0  # candidates in turn that were slow
        self._slow_of: Counter[tuple[int, str]] = Counter()  # the same of a kind
        self._compared = 0  # samples of PyTorch's own kernel since candidates are timed in place

    @property
    def baseline_median_ms(self) -> float:
        """Median time of PyTorch's own kernel in milliseconds; 0 if it was not timed."""
        count, found = self._median
        if count != len(self.baseline_ms):  # it is asked more often than a time is added
            found = median(self.baseline_ms)
            self._median = len(self.baseline_ms), found
        return found

    @property
    def is_long(self) -> bool:
        """Whether the first run of a candidate is timed; else one before it loads code, and makes launches ready."""
        return self.baseline_median_ms > _LONG_MS

    @property
    def saved_ms(self) -> float:
        """Milliseconds that the adopted candidate saves in a call; 0 if there is none."""
        return 0.0 if self.adopted is None else self.baseline_median_ms - median(self.adopted.samples_ms)

    def host_over_ms(self, candidate: Candidate | None) -> float:
        """Return by how much longer the host takes to issue a candidate; 0 for none, or if a time is not known."""
        known = candidate is not None and candidate.host_ms < inf and self.host_ms < inf
        return max(0.0, candidate.host_ms - self.host_ms) if candidate is not None and known else 0.0

    @property
    def has_new(self) -> bool:
        """Whether it has candidates that are still to be run."""
        return not self.finished and any(each.state is CandidateState.NEW for each in self.candidates or ())

    @property
    def hoped_ms(self) -> float:
        """Milliseconds of a step that could be saved at best: all above the time that its tensors take to be moved."""
        return max(0.0, self.baseline_median_ms - self.floor_ms) * self.calls

    def is_costly(self, step_ms: float, *, limited: bool = False) -> bool:
        """Return whether it could save so much of a step that more candidates are worth it, maybe within a limit."""
        return self.hoped_ms > _COSTLY_SHARE * step_ms or (limited and self.rank < _COSTLIEST)

    @property
    def is_near_floor(self) -> bool:
        """Whether PyTorch's own kernel is about as fast as its tensors can be read and written."""
        return self.floor_ms > 0 and self.baseline_median_ms <= _NEAR_FLOOR * self.floor_ms

    @property
    def fastest(self) -> list[Candidate]:
        """The candidates that are worth their time in the program; one of them is undivided, if there is one."""
        checked = [each for each in self.candidates or () if each.state is CandidateState.CHECKED]
        found = sorted(checked, key=lambda each: each.rough_ms)
        others = found[_MOST_TIMED:] if not any(each.is_undivided for each in found[:_MOST_TIMED]) else []
        return [*found[:_MOST_TIMED], *[each for each in others if each.is_undivided][:1]]

    def bound_by(self, bytes_per_ms: float) -> None:
        """Note the bandwidth of the device's memory; 0 if it is not known."""
        problem = self.problem
        touched = problem.x_bytes + problem.w_bytes + problem.y_bytes
        self.floor_ms = touched / bytes_per_ms if bytes_per_ms > 0 else 0.0

    def offer(self, candidates: Iterable[Candidate]) -> None:
        """Take candidates that were looked for; the headroom may be smaller by now than it was then."""
        self.candidates = [each for each in candidates if each.workspace_bytes <= self.headroom_bytes]

    def next_trial(self) -> Trial | None:
        """Return what to do in the next step; None if nothing, or if results are still awaited."""
        if self.finished or self.candidates is None or self.pending:
            return None
        baseline = self.baseline_median_ms
        promising = next((each for each in self.fastest if each.rough_ms < _PROMISING * baseline), None)
        if promising is not None and len(promising.samples_ms) < ENOUGH:  # it saves time already while it is timed
            return self._in_place(promising)
        new = self._next_new(self.candidates)
        if new is not None:
            return Trial(candidate=new, in_place=False, estimate_ms=_SHADOW_COST * baseline)
        missing = next((each for each in self.fastest if len(each.samples_ms) < ENOUGH), None)
        if missing is not None:
            return self._in_place(missing)
        if self.fastest and self._compared < ENOUGH:
            return Trial(candidate=None, in_place=True, estimate_ms=_IN_PLACE_COST * baseline)
        self.conclude()
        return None

    def _next_new(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the next candidate to run; None if those that are left promise too little."""
        many = len(candidates) >= _MANY
        if self._slow >= (len(candidates) // _MOST_OF_MANY if many else _MOST_SLOW):
            return None
        new = (each for each in candidates if each.state is CandidateState.NEW)
        return next((each for each in new if not many or self._slow_of[each.kind] < _MOST_SLOW), None)

    def conclude(self) -> None:
        """Adopt the fastest of the candidates that were timed often enough, if it is worth it and none was adopted."""
        if self.finished or self.candidates is None:
            return
        self.adopted = self._best(self.candidates)
        self.undivided = self._best([each for each in self.candidates if each.is_undivided])
        self.finished = True

    def is_timed(self, candidate: Candidate) -> bool:
        """Return whether a candidate's output was checked, and its time in the program taken often enough."""
        return candidate.state is CandidateState.CHECKED and len(candidate.samples_ms) >= ENOUGH

    def _best(self, candidates: Collection[Candidate]) -> Candidate | None:
        """Return the fastest of candidates that were timed often enough, if it is worth it."""
        baseline = self.baseline_median_ms
        # A kernel of many launches, as where groups are computed one by one, may take the host more than it saves.
        timed = [
            each
            for each in filter(self.is_timed, candidates)
            if self.host_over_ms(each) <= max(_HOST_MS, baseline - median(each.samples_ms))
        ]
        best = min(timed, key=lambda each: median(each.samples_ms), default=None)
        return best if best is not None and median(best.samples_ms) <= _WORTH_ADOPTING * baseline else None

    def _in_place(self, candidate: Candidate) -> Trial:
        baseline = self.baseline_median_ms
        lost = max(_IN_PLACE_COST * baseline, candidate.rough_ms - baseline) * max(1, self.calls)
        return Trial(candidate=candidate, in_place=True, estimate_ms=lost)

    def checked(self, candidate: Candidate, time_ms: float, error: float, tolerance: float) -> None:
        """Note the time of a candidate beside PyTorch's own kernel, and the relative distance of their outputs."""
        if not error <= tolerance:  # NaN is no distance
            candidate.reject(WRONG)
        elif self.is_long and not candidate.was_slow and 0 < time_ms - self.baseline_median_ms <= _LOADING_MS:
            candidate.was_slow = True  # it is checked once more
        elif time_ms > _WORTH_TIMING * self.baseline_median_ms:
            candidate.reject(SLOW)
            self._slow += 1
            self._slow_of[candidate.kind] += 1
        else:
            self._slow = self._slow_of[candidate.kind] = 0
            candidate.state, candidate.rough_ms = CandidateState.CHECKED, time_ms

    def missed(self, candidate: Candidate) -> None:
        """Note that no memory was free to check a candidate at one of the calls.

        If none is free for another output at any call, it is checked in the memory of PyTorch's own.
        """
        candidate.misses += 1
        if candidate.misses < self.calls:
            return
        if candidate.in_turn:
            candidate.reject(NO_MEMORY)
        candidate.in_turn, candidate.misses = True, 0

    def issued(self, candidate: Candidate | None, host_ms: float) -> None:
        """Note how long the host took to issue a candidate, or PyTorch's own kernel (None), without waiting."""
        kernel = self if candidate is None else candidate
        kernel.host_ms = min(kernel.host_ms, host_ms)

    def sampled(self, candidate: Candidate | None, time_ms: float) -> None:
        """Note a time in the program, of a candidate or of PyTorch's own kernel (None)."""
        if candidate is None:
            self._compared += any(each.samples_ms for each in self.candidates or ())
            self.baseline_ms.append(time_ms)
        else:
            candidate.samples_ms.append(time_ms)


def ranked(sites: Collection[CallSite], step_ms: float) -> list[CallSite]:
    """Return the sites that are worth trying in steps of some milliseconds, those first that could save the most."""
    hoped = {id(each): each.hoped_ms for each in sites}
    worth = [each for each in sites if hoped[id(each)] > _LEAST_SHARE * step_ms and not each.is_near_floor]
    found = sorted(worth, key=lambda each: -hoped[id(each)])[:_MOST_SITES]
    for rank, each in enumerate(found):
        each.rank = rank
    return found


def priority(site: CallSite) -> float:
    """Return the rank of a site: the sooner, the more time it could save, and the fewer of its candidates have run."""
    tried = sum(each.state is not CandidateState.NEW for each in site.candidates or ())
    return -site.hoped_ms / (1 + tried)


def worth_replacing(sites: Collection[CallSite], step_ms: float, *, spares_host: bool = False) -> list[CallSite]:
    """Return the sites whose kernel is replaced.

    If one kernel of a forward pass is replaced, each convolution there makes a detour through Python, and so for
    backward passes. So they save a part of the step together, or none is replaced.

    Args:
        sites: all sites.
        step_ms: time of a step.
        spares_host: whether the host may take a few microseconds longer for each kernel of a step, and no more, unless
            it is for kernels that save many times as much. Those come first that save most for it.
    """
    left_ms = _HOST_MS * sum(each.calls for each in sites) if spares_host else inf
    affordable, adopted = [], [each for each in sites if each.saved_ms > 0]
    for each in sorted(adopted, key=lambda each: each.host_over_ms(each.adopted) / each.saved_ms):
        over_ms = each.host_over_ms(each.adopted)
        if over_ms * each.calls <= max(0.0, left_ms) or each.saved_ms >= _MANY_TIMES * over_ms:
            affordable.append(each)
            left_ms -= over_ms * each.calls
    found: list[CallSite] = []
    for forward in (True, False):
        adopted = [each for each in affordable if (each.problem.operation is Operation.FORWARD) is forward]
        if sum(each.saved_ms * each.calls for each in adopted) >= _LEAST_GAIN * step_ms:
            found += adopted
    return found


def sets_to_compare(sites: Collection[CallSite]) -> list[dict[CallSite, Candidate | None]]:
    """Return sets of candidates, of which the one stays with which whole steps are the fastest.

    A launch costs the host time that the times of kernels do not show. So beside all that replace a kernel, there are
    those of a single launch, if some have more, and the few that save most of the time, if there are others.
    """
    sets: list[dict[CallSite, Candidate | None]] = [{site: site.adopted for site in sites}]
    if any(site.adopted is not site.undivided for site in sites):
        sets.append({site: site.undivided for site in sites})
    by_gain = sorted(sites, key=lambda site: -site.saved_ms * site.calls)
    missing_ms = _LEAST_OF_GAIN * sum(site.saved_ms * site.calls for site in sites)
    few: dict[CallSite, Candidate | None] = {}
    for site in by_gain:
        if missing_ms <= 0:
            break
        few[site] = site.adopted
        missing_ms -= site.saved_ms * site.calls
    if len(few) <= _MOST_OF_KERNELS * len(sites):
        sets.append(few)
    return sets


def timed(sites: Collection[CallSite]) -> list[tuple[ConvolutionProblem, Configuration, list[float]]]:
    """Return the candidates that were timed often enough in the program, with their times in milliseconds."""
    return [
        (site.problem, each.configuration, each.samples_ms)
        for site in sites
        for each in filter(site.is_timed, site.candidates or ())
    ]
