"""The paper's figure 11: ResNet-18 at a mini-batch of 128 within 8, 64 and 512 MiB for each kernel, under each policy.

python bench/figure11.py                     planned from the recorded H200 profile
python bench/figure11.py --backend cudnn     executed on this machine's GPU
python bench/figure11.py --from CSV          drawn again
"""

from bench.paper.figure10 import figure
from bench.paper.figures import parse

if __name__ == "__main__":
    figure(parse(__doc__), "figure11", "resnet18", {64: "1.21 x (all)"})
