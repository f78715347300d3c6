"""Records the training steps that ship with the package.

    python -m bench.memory.record_steps                # all, about 2 minutes
    python -m bench.memory.record_steps resnet50 gpt2  # some of them

It needs PyTorch and no GPU. The networks are those of `bench.memory.models`; the convolutional ones train with SGD and
momentum, GPT with Adam.
"""

from dataclasses import replace
from pathlib import Path

from bench.tools.script import add_names, command_line
from ucudnn.memory.step.file import encode_step
from ucudnn.memory.torch.measuring.training_step import TrainingRecipe
from ucudnn.memory.torch.record import record
from ucudnn.reporting.output_file import write_whole

STEPS = Path(__file__).parents[2] / "ucudnn" / "memory" / "steps"


def recipe(name: str, batch: int, shape: tuple[int, ...] = (3, 224, 224), **changes: object) -> TrainingRecipe:
    """Return what is recorded of one of our models."""
    return replace(TrainingRecipe(model=f"bench.memory.models:{name}", batch=batch, shape=shape), **changes)  # type: ignore[arg-type]


RECIPES = {
    "alexnet": recipe("alexnet", 256),
    "vgg16": recipe("vgg16", 64),
    "vgg16_bn": recipe("vgg16_bn", 64),
    "resnet50": recipe("resnet50", 256),
    "inception_v3": recipe("inception_v3", 64, (3, 299, 299), loss="bench.memory.models:inception_loss"),
    "densenet121": recipe("densenet121", 64),
    "unet2d": recipe("unet2d", 8, (3, 512, 512)),
    "unet3d": recipe("unet3d", 4, (1, 128, 128, 128)),
    "gpt2": recipe("gpt2", 8, (1024,), tokens=True, optimizer="adam"),
}


def main() -> None:
    """Record all steps, or those that are named."""
    parser = command_line(__doc__, "bench.memory.record_steps")
    add_names(parser, RECIPES)
    parser.add_argument("--out", type=Path, default=STEPS, help="folder; default: the package's")
    arguments = parser.parse_args()
    for name in arguments.names or RECIPES:
        path = arguments.out / f"{name}.json"
        step = replace(record(RECIPES[name], progress=print), name=name)
        write_whole(path, encode_step(step, compress=path.suffix == ".gz"))
        print(f"written to {path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
