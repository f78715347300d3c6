"""The settings of `bench.torch.networks`: PyTorch alone, and ucudnn as it is turned on. Not a script."""

from argparse import Namespace
from pathlib import Path

import torch

import ucudnn.torch
from ucudnn.torch.tuning.auto_interceptor import AutoInterceptor

SETTINGS = ("stock", "auto", "stock-off", "auto-off", "64MiB")
FIRST = "-first"


def turned_on(setting: str, backend: str, database: str | None = None) -> "ucudnn.torch.Enabled | None":
    """Turn a setting on, before the first step; without a file for the database, its default place is used."""
    way = setting.removesuffix("-off")
    torch.backends.cudnn.benchmark = way == setting
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    if way == "stock":
        return None
    options = {"database": database, **({"tune": FIRST.removeprefix("-")} if way.endswith(FIRST) else {})}
    return ucudnn.torch.enable(backend=backend, workspace_limit=way.removesuffix(FIRST), **options)


def is_settled(on: "ucudnn.torch.Enabled | None") -> bool:
    """Whether nothing is tried any more."""
    return on is None or all(each.phase == "settled" for each in on.report().tuned)


def phase_of(on: "ucudnn.torch.Enabled | None") -> str:
    """Return what the program's tuner does now; '' before there is one, or where nothing is tuned."""
    tuners = [] if on is None or not isinstance(on._interceptor, AutoInterceptor) else on._interceptor.tuners().values()
    return ", ".join(each.phase.value for each in tuners)


def database_of(arguments: Namespace) -> str:
    """Return whether a database of an earlier process of the cell is kept, is empty, or is not used at all."""
    if arguments.setting.startswith("stock"):
        return "none"
    if arguments.database is None:
        return "default place"
    return "kept" if Path(arguments.database).exists() else "empty"
