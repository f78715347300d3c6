"""Make a small random data set for nnU-Net v2, plan it, and train it for two steps with nnU-Net's own commands.

    pip install nnunetv2 '.[torch]' && python examples/volumes/random_data.py FOLDER [TRAINER]

No GPU is needed. TRAINER is FitTrainer, or nnU-Net's own: nnUNetTrainer.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import SimpleITK

NAME = "Dataset900_Random"
SHORT = """
from {module} import {trainer}


class Short{trainer}({trainer}):
    def __init__(self, plans, configuration, fold, dataset_json, device):
        super().__init__(plans, configuration, fold, dataset_json, device)
        self.num_epochs, self.num_iterations_per_epoch, self.num_val_iterations_per_epoch = 1, 2, 1
"""


def make_data(folder: Path, edge: int = 32, cases: int = 5) -> None:
    """Write images of noise, each with a brighter cube that is the label."""
    generator = np.random.default_rng(0)
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True)
    for case in range(cases):
        image, label = generator.normal(size=(edge,) * 3).astype(np.float32), np.zeros((edge,) * 3, np.uint8)
        label[8:20, 8:20, 8:20] = 1
        SimpleITK.WriteImage(
            SimpleITK.GetImageFromArray(image + label), folder / "imagesTr" / f"case_{case}_0000.nii.gz"
        )
        SimpleITK.WriteImage(SimpleITK.GetImageFromArray(label), folder / "labelsTr" / f"case_{case}.nii.gz")
    labels = {"background": 0, "cube": 1}
    content = {"channel_names": {"0": "CT"}, "labels": labels, "numTraining": cases, "file_ending": ".nii.gz"}
    (folder / "dataset.json").write_text(json.dumps(content))


def main(folder: Path, trainer: str = "FitTrainer") -> None:
    """Make the data set in a folder, and run nnU-Net's commands on it."""
    names = ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results", "nnUNet_extTrainer")
    places = {name: str(folder.resolve() / name) for name in names}
    here = str(Path(__file__).resolve().parent)
    settings = {"nnUNet_compile": "0", "UCUDNN_BUDGET": "128MiB", **os.environ, **places}
    settings["PYTHONPATH"] = os.pathsep.join([here, *sys.path[1:]])
    module = "fit_trainer" if trainer == "FitTrainer" else "nnunetv2.training.nnUNetTrainer.nnUNetTrainer"
    Path(places["nnUNet_extTrainer"]).mkdir(parents=True)
    short = Path(places["nnUNet_extTrainer"]) / "short_trainer.py"
    short.write_text(SHORT.format(module=module, trainer=trainer))
    make_data(Path(places["nnUNet_raw"]) / NAME)
    commands = Path(sys.executable).parent
    plan = "nnUNetv2_plan_and_preprocess -d 900 -c 3d_fullres -npfp 1 -np 1"
    train = f"nnUNetv2_train 900 3d_fullres 0 -tr Short{trainer} -device cpu"
    for line, workers in ((plan, "1"), (train, "0")):
        print(f"+ {line}", flush=True)
        called = [str(commands / line.split()[0]), *line.split()[1:]]
        subprocess.run(called, env={**settings, "nnUNet_n_proc_DA": workers}, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
