"""Programs and models that the handbook only names: they stand in the folder of a reader who types its commands."""

TRAIN = """
import argparse
import os

import torch

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    epochs = parser.parse_args().epochs
    ranks = "RANK" in os.environ
    if ranks:
        torch.distributed.init_process_group("gloo")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Conv2d(3, 4, 3, device=device)
    for _ in range(epochs):
        model(torch.randn(4, 3, 8, 8, device=device)).sum().backward()
    print(f"trained {epochs}\\n", end="")  # in one piece, because ranks share the output
    if ranks:
        torch.distributed.destroy_process_group()
"""
MODELS = """
import torch


def net():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 16, stride=16), torch.nn.Flatten(), torch.nn.Linear(784, 10))


def resnet50():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 2, 32, stride=32), torch.nn.Flatten(), torch.nn.Linear(98, 10))
"""
