"""The paper's figure 11: ResNet-18 at a mini-batch of 128 within 8, 64 and 512 MiB for each kernel, under each policy.

    python -m bench.paper.figure11                     plan from the recorded H200 profile
    python -m bench.paper.figure11 --backend cudnn     execute on this machine's GPU
    python -m bench.paper.figure11 --from CSV          draw again

`bench.paper.figure10` is the same figure of AlexNet.
"""

from bench.paper.figure10 import figure
from bench.paper.figures import parse


def main() -> None:
    """Measure and draw the figure of ResNet-18."""
    figure(parse(__doc__, __spec__.name), "figure11", "resnet18", {64: "1.21 x (all)"})


if __name__ == "__main__":
    main()
