"""Command lines: the settings that their options make, and a refusal of options that would have no effect.

Every command of `ucudnn`, and `python -m ucudnn.torch`, reads its options here, so that none of them forgets one.
"""

from argparse import HelpFormatter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from textwrap import wrap
from typing import Any, final

from ucudnn.errors import SettingsError
from ucudnn.policy import BatchSizePolicy
from ucudnn.settings import VARIABLES, Settings

_FIELDS = {
    "--policy": "policy",
    "--workspace": "workspace_limit_bytes",
    "--total-workspace": "total_workspace_bytes",
    "--devices": "benchmark_devices",
    "--database": "database",
    "--backend": "backend",
    "--solver": "solver",
    "--solver-time-limit": "solver_time_limit_seconds",
    "--slabs": "slabs",
    "--no-slabs": "slabs",
    "--remeasure": "remeasure",
    "--plans": "plans",
    "--strict": "strict",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NoEffect:
    """Options that have no effect in some case, so that nobody types them in vain.

    A case is named by what is present: an option such as '--torch'; an option with a value, '--dtype float16'; or a
    setting, wherever it comes from: 'backend cpu', 'backend replay', 'backend cudnn:', 'policy undivided'. The option
    '--total-workspace' is present where its variable in the environment is set, too.

    Attributes:
        options: the options.
        beside: one of these is present; () where that does not matter.
        without: none of these is present.
    """

    options: tuple[str, ...]
    beside: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def refuse(self, typed: Iterable[str], present: Mapping[str, str]) -> None:
        """Refuse the options that have no effect, with an error that names them and says why."""
        wrong = [each for each in typed if each in self.options]
        beside = [present[each] for each in self.beside if each in present]
        if not wrong or (self.beside and not beside) or any(each in present for each in self.without):
            return
        named, have, them = ", ".join(wrong), "have" if len(wrong) > 1 else "has", "them" if len(wrong) > 1 else "it"
        if beside:
            raise SettingsError(f"{named} {have} no effect with {beside[0]}: leave {them} out")
        raise SettingsError(
            f"{named} {have} no effect without {' or '.join(self.without)}: add that, or leave {them} out"
        )


def read_settings(typed: Mapping[str, object], rules: Iterable[NoEffect] = (), **instead: Any) -> Settings:
    """Return the settings that the options of a command line make, over the environment over defaults.

    Args:
        typed: the options that were typed, by the name of the option, with their values; other options do no harm.
        rules: the options that have no effect in some case.
        **instead: values by field of `Settings`, in place of what the options say.

    Raises:
        SettingsError: if an option or a variable has a value that it may not have, or an option has no effect.
    """
    fields = {_FIELDS[option]: value for option, value in typed.items() if option in _FIELDS}
    names = {_FIELDS[option]: option for option in typed if option in _FIELDS}
    if "--profile" in typed:
        fields["backend"], names["backend"] = f"replay:{typed['--profile']}", "--profile"
    settings = Settings.load(names=names, **{**fields, **instead})
    present = _present(typed, settings)
    for rule in rules:
        rule.refuse(typed, present)
    return settings


_PACKAGES = ("torchvision", "timm", "transformers")  # of models, which a user may be told to install


def missing_module(name: str) -> str:
    """Return that there is no module of a model, and which package has it where that is sure."""
    if name in _PACKAGES:  # others are not offered: a mistyped name may be that of a stranger's package
        return f"{name} is not installed: pip install {name}"
    return f"there is no module {name}: no {name}.py in this folder or on PYTHONPATH, and no installed package"


def _present(typed: Mapping[str, object], settings: Settings) -> dict[str, str]:
    """Return what rules ask for, with the words that people know it by."""
    present = {option: option for option in typed}
    for option, value in typed.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            text = f"{option} {each}"
            present[text.lower()] = text
    if settings.total_workspace_bytes is not None:
        present.setdefault("--total-workspace", VARIABLES["total_workspace_bytes"])
    kind, colon, _ = settings.backend.partition(":")
    backend = "--profile" if "--profile" in typed else f"backend {settings.backend}"
    present[f"backend {kind}:" if kind == "cudnn" and colon else f"backend {kind}"] = backend
    if settings.policy is BatchSizePolicy.UNDIVIDED:
        present["policy undivided"] = "policy undivided"
    return present


@final
class WholeWords(HelpFormatter):
    """Help of a command of argparse, with lines that are broken between words only.

    Paragraphs of the text around the options are as wide as the terminal. Those with indented lines stay as they are.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(
            each if "\n " in f"\n{each}" else "\n".join(self._split_lines(each, width)) for each in paragraphs
        )

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)
