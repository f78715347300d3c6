#!/usr/bin/env bash
# functional_call leaves a model with other parameters where one module is at two places of it.
#
# Seen: after the call the weight is the model's own: False; its values are those of before: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/python" -W ignore - <<'PROGRAM'
import torch
from torch import nn

body = nn.Linear(3, 3)
model = nn.Sequential(body, nn.ReLU(), body)
own, before = body.weight, body.weight.detach().clone()
others = {name: torch.zeros_like(tensor) for name, tensor in model.named_parameters()}
torch.func.functional_call(model, others, (torch.ones(2, 3),))
kept, same = model[0].weight is own, torch.equal(model[0].weight, before)
print(f"torch {torch.__version__}: after the call the weight is the model's own: {kept}; its values are those of before: {same}")
assert not kept and not same
PROGRAM
