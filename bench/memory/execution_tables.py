"""The tables of `bench.memory.execution`: budgets, the papers' policies, and vDNNExt beside vDNN; losers first."""

from collections.abc import Mapping, Sequence
from typing import Any

from ucudnn.memory.torch.comparison.contention import MOST_EXTRA
from ucudnn.memory.torch.comparison.trial_result import PYTORCH

WITHOUT_COPIES, WITH_HIDDEN_COPIES = "stock", "swap-hidden"
GIB = 2**30
LEAST_OF_LINK = 0.9  # of its bandwidth times the time of forward
FLOOR = "is below the floor"
CLAIMS = {
    "vdnn-all-p": "1.23 VGG-16 128, 1.27 AlexNet 128, 1.15 AlexNet 128 (study)",
    "vdnn-ext-all-p": "1.05 AlexNet 128, where vDNN takes 1.15",
    "vdnn-all-m": "1.06 AlexNet 128, of base (m)",
    "vdnn-ext-all-m": "1.02 AlexNet 128, of base (m)",
    "vdnn-conv-m": "1.006 AlexNet 512, of base (m)",
    "vdnn-ext-conv-m": "1.001 AlexNet 512, of base (m)",
    "vdnn-dynamic": "1.22 VGG-16 256 within 12 GB",
    "swap": "below 1.10 ResNet-50",
    "dymem": "1 / 1.42 of vDNN's time, ResNet-50 100",
}
"""What the papers say of the time of a step, as multiples of their base's; on a Titan X, a GTX 970 and an M40."""


def budget_rows(cases: Sequence[Mapping[str, Any]], base: Mapping[tuple[str, str], Any]) -> list[str]:
    """Return a line for each cell with a budget: those that failed first, then the slowest."""
    lines = []
    for case in sorted(cases, key=lambda each: (_rank(each), -_slowdown(each, base))):
        head = f"| {case['network']} | {case['share']:.0%} | {case['budget'] / GIB:.3f} |"
        if "allocated" not in case:
            what = "below the floor" if _rank(case) else "FAILED"
            lines.append(f"{head} {what}: {case['reason']} | | | | | | | | |")
            continue
        reserved = case["reserved"] or case["allocated"]
        overlap = "" if case["overlap"] is None else f"{case['overlap']:.0%}"
        lines.append(
            f"{head} {case['predicted_peak'] / GIB:.3f} | {case['allocated'] / GIB:.3f} |"
            f" {case['predicted_peak'] / case['allocated'] - 1:+.1%} | {reserved / case['allocated'] - 1:+.1%} |"
            f" {case['predicted_ms']:.1f} | {case['step_ms']:.1f} | {case['predicted_ms'] / case['step_ms'] - 1:+.1%} |"
            f" {_slowdown(case, base):.2f} | {case['offloaded'] / GIB:.2f} {overlap} |"
        )
    return lines


def _slowdown(case: Mapping[str, Any], base: Mapping[tuple[str, str], Any]) -> float:
    return float(case.get("step_ms", 0) / base[_key(case)]["step_ms"])


def _rank(case: Mapping[str, Any]) -> int:
    """Order: what failed, what lies below the floor, what ran."""
    return 2 if "allocated" in case else int(FLOOR in case["reason"])


def paper_rows(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each policy without a budget: those that failed first, then the slowest."""
    lines = []
    for case in sorted(cases, key=lambda each: ("step_ms" in each, -each.get("step_ms", 0) / each["base_ms"])):
        head = f"| {case['network']} | {_MATHS[_math(case)]} | {case['policy']} | {_kernels(case)} |"
        if "allocated" not in case:
            lines.append(f"{head} FAILED: {case['reason']} | | | | | | | | | |")
            continue
        overlap = "" if case["overlap"] is None else f"{case['overlap']:.0%}"
        lines.append(
            f"{head} {case['predicted_ms']:.1f} | {case['step_ms']:.1f} |"
            f" {case['predicted_ms'] / case['step_ms'] - 1:+.1%} |"
            f" {case['step_ms'] / case['base_ms']:.2f} | {CLAIMS.get(case['policy'], '')} |"
            f" {case['predicted_peak'] / GIB:.3f} | {case['allocated'] / GIB:.3f} |"
            f" {case['predicted_peak'] / case['allocated'] - 1:+.1%} |"
            f" {case['allocated'] / case['base_allocated']:.0%} |"
            f" {case['offloaded'] / GIB:.2f} / {case['prefetched'] / GIB:.2f} | {overlap} |"
        )
    return lines


def pair_rows(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each step of which vDNN and vDNNExt ran with the same offloads: the least gain first."""
    times = {(*_key(case), case["policy"]): case["step_ms"] for case in cases if "step_ms" in case}
    found = []
    for (network, math, policy), extended in times.items():
        ours = times.get((network, math, policy.replace("vdnn-ext", "vdnn")))
        if policy.startswith("vdnn-ext") and ours is not None:
            gain = extended / ours - 1
            name = policy.removeprefix("vdnn-ext-")
            found.append((gain, f"| {network} | {_MATHS[math]} | {name} | {ours:.1f} | {extended:.1f} | {gain:+.1%} |"))
    return [line for _, line in sorted(found, reverse=True)]


def hidden_rows(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each step that offloads what it can hide: what misses first, the least share of the link first.

    A case of which the contention was not measured shows that, and holds nothing.
    """
    plain = {_key(case): case for case in cases if case["policy"] == WITHOUT_COPIES and "step_ms" in case}
    found = []
    for case in cases:
        if case["policy"] != WITH_HIDDEN_COPIES or "step_ms" not in case or _key(case) not in plain:
            continue
        stock = plain[_key(case)]
        link = case["forward_ms"] * case["to_host_bytes_per_ms"]
        share, measured = case["offloaded"] / link, case.get("contention")
        kept = share >= LEAST_OF_LINK and bool(measured and measured["within"])
        line = (
            f"| {case['network']} | {_MATHS[_math(case)]} | {case['offloaded'] / GIB:.2f} | {link / GIB:.2f} |"
            f" {share:.0%} | {_turns(case, stock, measured)} |"
            f" {1 - case['allocated'] / stock['allocated']:.1%} |"
            f" {'yes' if kept else 'MISSED' if measured or share < LEAST_OF_LINK else 'unknown'} |"
        )
        found.append((kept, share, line))
    return [line for _, _, line in sorted(found)]


def _turns(case: Mapping[str, Any], stock: Mapping[str, Any], measured: Mapping[str, Any] | None) -> str:
    """Return the times without copies and with them, what they take more, contention, and the free copies' buffer."""
    if not measured:
        extra = case["step_ms"] - stock["step_ms"]
        return f"{stock['step_ms']:.1f} | {case['step_ms']:.1f} | {extra:+.1f}, not in turns | not measured | "
    spreads = (
        f"{measured[f'{name}_ms']:+.1f} ({measured[f'{name}_low_ms']:+.1f} to {measured[f'{name}_high_ms']:+.1f})"
        for name in ("extra", "contention")
    )
    times = f"{measured['base_ms']:.1f} | {measured['planned_ms']:.1f}"
    return f"{times} | {' | '.join(spreads)} | {measured['buffer'] / GIB:.2f}"


_MATHS = {"tf32": "TF32", "fma": "float32"}


def _math(case: Mapping[str, Any]) -> str:
    return str(case.get("math", "tf32"))


def _key(case: Mapping[str, Any]) -> tuple[str, str]:
    return str(case["network"]), _math(case)


def _kernels(case: Mapping[str, Any]) -> str:
    """Return how many convolutions ran as the plan chose, and the largest workspace."""
    if not case.get("configured"):
        return "PyTorch's"
    divided = f", {case['divided']} divided" if case["divided"] else ""
    return f"{case['configured']}{divided}, {case['workspace'] / GIB:.3f} GiB"


BUDGET_COLUMNS = (
    *("network", "budget", "GiB", "predicted GiB", "measured GiB", "off", "reserved over allocated", "predicted ms"),
    *("ms", "off", "of PyTorch's time", "GiB to the host, overlap"),
)
PAPER_COLUMNS = (
    *("network", "math", "policy", "convolutions by the plan, largest workspace", "predicted ms", "ms", "off"),
    *("of PyTorch's time", "the paper's, of its base", "predicted GiB", "measured GiB", "off", "of PyTorch's peak"),
    *("GiB to the host / back", "overlap"),
)
HIDDEN_COLUMNS = (
    *("network", "math", "GiB to the host", "link times forward, GiB", "share", "ms without copies", "ms", "more"),
    *("contention", "GiB of the free copies' buffer", "peak less"),
    f"{LEAST_OF_LINK:.0%} of the link, at most contention and {MOST_EXTRA:.0%} more",
)
PAIR_COLUMNS = ("network", "math", "offloads", "vDNN ms", "vDNNExt ms", "vDNNExt over vDNN")


def show(cases: Mapping[str, Any]) -> None:
    """Print the tables of what is kept, and how many of the required figures hold."""
    base = {_key(case): case for case in cases.values() if case["policy"] == PYTORCH and "allocated" in case}
    for (network, math), case in base.items():
        took = f"{case['step_ms']:.1f} ms, {case['allocated'] / GIB:.3f} GiB"
        print(f"PyTorch's own step of {network} {case['batch']}, {_MATHS[math]}: {took}")
    within = [case for case in cases.values() if case["share"] and _key(case) in base]
    without = [case for case in cases.values() if "base_ms" in case]
    for columns, rows in (
        (BUDGET_COLUMNS, budget_rows(within, base)),
        (PAPER_COLUMNS, paper_rows(without)),
        (PAIR_COLUMNS, pair_rows(without)),
        (HIDDEN_COLUMNS, hidden_rows(without)),
    ):
        if rows:
            print("\n| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
            print("\n".join(rows))
    ran = [case for case in within if "allocated" in case]
    if within:
        failed = sum(_rank(case) == 0 for case in within)
        peak = sum(abs(case["predicted_peak"] / case["allocated"] - 1) <= 0.02 for case in ran)
        time = sum(abs(case["predicted_ms"] / case["step_ms"] - 1) <= 0.05 for case in ran)
        waste = sum((case["reserved"] or case["allocated"]) <= 1.05 * case["allocated"] for case in ran)
        below = len(within) - len(ran) - failed
        print(f"\n{len(within)} cells: {failed} failed, {below} below the floor, {len(ran)} ran")
        print(f"of these, peaks predicted within 2 %: {peak}, times within 5 %: {time}")
        print(f"and at most 5 % more reserved than allocated: {waste}")
