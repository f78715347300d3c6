"""The options that programs which train a network have in common. Not a script."""

from argparse import ArgumentParser

from bench.tools.script import add_commit
from bench.torch.measuring import torch_command_line
from bench.torch.network_step import FORMS, NETWORKS


def network_command_line(
    description: str | None, module: str, *, network: str = "resnet50", form: str = ""
) -> ArgumentParser:
    """Return a parser with --backend, --out, --commit and --network.

    Args:
        description: text of --help.
        module: the script, as `python -m` takes it.
        network: default of --network.
        form: default of --form; without it there is no such option.
    """
    parser = torch_command_line(description, module)
    add_commit(parser)
    parser.add_argument("--network", choices=NETWORKS, default=network, help="network (%(default)s)")
    if form:
        parser.add_argument("--form", choices=FORMS, default=form, help="type and layout (%(default)s)")
    return parser
