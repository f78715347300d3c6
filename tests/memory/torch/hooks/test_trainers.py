"""Trainers of other packages within a budget, with random data, compared with the same training without one."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.support.plain_training import assert_same_bits
from ucudnn.memory import budget, fit

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the packages
WIDTH, ROWS = 32, 512


def network():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(5)), nn.Linear(WIDTH, 4))


def data():
    torch.manual_seed(1)
    return TensorDataset(torch.randn(3 * ROWS, WIDTH), torch.randint(4, (3 * ROWS,)))


def compare(train, within):
    """Train a copy of a network without a budget, with an endless one, and within a share of what that took."""
    plain, others = network(), [network(), network()]
    train(plain)
    with budget("4GiB", device="cpu") as endless:
        train(others[0])
    limit = int(endless.peak_bytes * within)
    with budget(limit, device="cpu") as kept:
        train(others[1])
    assert kept.peak_bytes <= limit
    assert "offloaded: 0" not in kept.report()
    for other in others:
        assert_same_bits(other.parameters(), plain.parameters())


def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Task(lightning.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            return functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train(model):
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", default_root_dir=tmp_path, enable_model_summary=False, **quiet
        )
        trainer.fit(Task(model), DataLoader(data(), ROWS))

    compare(train, 0.7)


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")

    def train(model):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(data(), ROWS))
        for x, y in [*batches] * 2:
            with accelerator.accumulate(model):
                accelerator.backward(functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

    compare(train, 0.7)


@pytest.mark.parametrize("name", ["Lookahead", "AdamP"])
def test_optimizers_of_timm(name):
    optim = pytest.importorskip("timm.optim")

    def train(model):
        optimizer = optim.AdamP(model.parameters(), lr=1e-2)
        if name == "Lookahead":
            optimizer = optim.Lookahead(torch.optim.SGD(model.parameters(), lr=0.1), k=2)
        for x, y in [*DataLoader(data(), ROWS)] * 2:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    compare(train, 0.8)


@pytest.mark.parametrize("way", ["block", "hooks"])
def test_trainer_of_transformers(way, tmp_path):
    """Trainer adds num_items_in_batch where the model takes it, and divides the loss by it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 2, "vocab_size": 100, "n_positions": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    other = copy.deepcopy(model)
    texts = [{"input_ids": each, "labels": each} for each in torch.randint(100, (32, 64))]

    def train(model):
        options = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=5, use_cpu=True,
            save_strategy="no", report_to=[], disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        transformers.Trainer(model, options, train_dataset=texts).train()

    train(model)
    if way == "block":
        with budget("6MiB", device="cpu") as kept:
            train(other)
        assert kept.peak_bytes <= 6 * 2**20
    else:
        kept = fit(other, texts[0], budget="6MiB", policy="hooks")
        assert kept.accepts_loss_kwargs
        train(kept)
    assert "offloaded: 0" not in kept.report()
    assert_same_bits(other.parameters(), model.parameters())
