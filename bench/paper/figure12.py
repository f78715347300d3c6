"""The paper's figures 12 and 13: WR against WD within the same total, and the division itself.

    python -m bench.paper.figure12                     plan from the recorded H200 profile
    python -m bench.paper.figure12 --backend cudnn     execute on this machine's GPU
    python -m bench.paper.figure12 --from CSV          draw again

AlexNet 256 with 120, 960 and 7680 MiB in total, ResNet-50 32 with 2544 and 5088 MiB. `bench.paper.division` measures
the same in more ways, and Inception-v3.
"""

from collections.abc import Iterator
from pathlib import Path

from bench.paper.figures import MIB, Bench, Row, Table, beside, parse, show
from bench.tools.script import note
from ucudnn.errors import UcudnnError
from ucudnn.plots import draw_division, draw_layers

EACH_MIB = {"alexnet": (8, 64, 512), "resnet50": (16, 32)}
WAYS = (("WR", "undivided"), ("WR", "powerOfTwo"), ("WD", "powerOfTwo"))
PAPER = {("alexnet", 120): "1.38 x (all)"}


def measure(bench: Bench, limits: tuple[int, ...]) -> Iterator[list[Row]]:
    """Yield the rows of each total."""
    kernels = sum(kernel.count for kernel in bench.network.kernels())
    for limit in limits:
        total = limit * kernels
        yield bench.rows(
            {
                f"{total} MiB in total, {way} {policy}": {"policy": policy}
                | ({"total_workspace_bytes": total * MIB} if way == "WD" else {"workspace_limit_bytes": limit * MIB})
                for way, policy in WAYS
            }
        )


def label(plan: str) -> str:
    """Return the label of a bar: '120 MiB' above 'WD p'."""
    total, _, way = plan.partition(" in total, ")
    name, _, policy = way.partition(" ")
    return f"{total}\n{name} {policy[0]}"


def draw(table: Table, path: Path) -> None:
    """Draw figure 12."""
    draw_layers(table.bars(label), path, title=f"{table.title}; u: undivided, p: powerOfTwo")
    print(f"wrote {path}")


def draw_least(table: Table, path: Path) -> None:
    """Draw figure 13 from the rows of the least total, as the paper does."""
    division = path.with_name(path.name.replace("figure12", "figure13"))
    draw_division(table.bars(label)[: len(WAYS)], division, title=f"{table.title}; u: undivided, p: powerOfTwo")
    print(f"wrote {division}")


def tell(table: Table) -> None:
    """Print the paper's numbers and ours."""
    name = table.title.partition(",")[0]
    totals = dict.fromkeys(int(row["plan"].partition(" ")[0]) for row in table.rows)
    for total in totals:
        plans = [f"{total} MiB in total, {way} {policy}" for way, policy in WAYS]
        for (way, _), plan in zip(WAYS[1:], plans[1:], strict=True):
            said = PAPER.get((name, total), "-") if way == "WD" else "-"
            beside(f"{name}, {total} MiB, {way} over WR undivided", said, table.gain(plans[0], plan))
    for network, few, much, said in (("alexnet", 120, 960, "1.24 x (*)"), ("resnet50", 2544, 5088, "1.14 x (all)")):
        if name == network:
            before, after = (
                table.total_ms(f"{much} MiB in total, WR undivided"),
                table.total_ms(f"{few} MiB in total, WD powerOfTwo"),
            )
            ours = f"{before / after:.2f} x" if before and after else "-"
            beside(f"{name}, WD with {few} MiB over WR undivided with {much} MiB", said, ours)
            if "*" in said:
                print("(*) of the whole iteration, with layers other than convolutions")


def main() -> None:
    """Measure and draw both figures of both networks."""
    arguments = parse(__doc__, __spec__.name)
    for path in arguments.drawn or ():
        show(path, arguments.module, tell, draw, draw_least)
    for name, limits in () if arguments.drawn else EACH_MIB.items():
        bench = Bench(arguments, name)
        try:
            path = bench.record(f"figure12_{name}", measure(bench, limits))
        except UcudnnError as error:
            note(str(error))  # the other network can still be measured
        else:
            show(path, arguments.module, tell, draw, draw_least)


if __name__ == "__main__":
    main()
