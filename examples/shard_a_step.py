"""Shard a step among ranks: FSDP2's training, with gathering and dropping of parameters in one plan.

    python3 -m venv .venv && .venv/bin/pip install --quiet '.[torch]' && .venv/bin/python examples/shard_a_step.py

It starts two ranks, on CPUs or on a GPU each. `torchrun --nproc-per-node 8 examples/shard_a_step.py` starts eight.
"""

import os

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun

import ucudnn.memory


def main() -> None:
    """Train a small transformer whose parameters are divided among the ranks."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)  # the same parameters on all ranks
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(100, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 100)).to(kind)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1 + distributed.get_rank())  # other data on each of them
    tokens = torch.randint(100, (8, 33), device=kind)

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    batch = tokens[:, :-1], tokens[:, 1:]
    step = ucudnn.memory.fit(model, batch, loss=loss, optimizer=optimizer, policy="checkpoint", mesh=mesh)
    for _ in range(3):
        optimizer.zero_grad()
        step(*batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if distributed.get_rank() == 0:
        lines = step.report().splitlines()
        print("\n".join(lines[lines.index(next(each for each in lines if each.startswith("sharded"))) :]))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        torchrun(["--standalone", "--nproc-per-node", "2", __file__])
