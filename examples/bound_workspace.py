"""Bound the workspace of a PyTorch model's convolutions. The model, the loss and the gradients stay the same.

    python3 -m venv .venv && .venv/bin/pip install --quiet '.[torch]' && .venv/bin/python examples/bound_workspace.py

On a GPU, cuDNN computes. Without one, NumPy does, so this runs everywhere.
"""

import torch

import ucudnn.torch

BACKEND = "auto" if torch.cuda.is_available() else "cpu"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def gradients(model: torch.nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of one training step."""
    model.zero_grad()
    model(images).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def main() -> None:
    """Take a step without ucudnn, then steps within smaller and smaller limits."""
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False  # so that all algorithms round alike, and gradients can be compared
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 5, padding=2),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 32, 3, padding=1),
    ).to(DEVICE)
    images = torch.randn(16, 3, 32, 32, device=DEVICE)
    wanted = gradients(model, images)

    print("limit     largest workspace  divided calls  gradients differ by")
    for limit in ("16MiB", "4MiB", "1MiB"):
        with ucudnn.torch.enable(workspace_limit=limit, backend=BACKEND) as on:
            found = gradients(model, images)
        summary = on.report()
        largest = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))
        divided = f"{summary.divided} of {summary.calls}"
        print(f"{limit:8}  {summary.workspace_bytes / 1024:10.0f} KiB     {divided:13}  {largest:.0e}")
    print()
    print(summary)


if __name__ == "__main__":
    main()
