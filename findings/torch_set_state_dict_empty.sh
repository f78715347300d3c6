#!/usr/bin/env bash
# set_state_dict takes an empty dictionary of a model for nothing to be done.
#
# Seen: missing keys {}, model as before: True; alone: refuses it
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
cat >"$folder/program.py" <<'PROGRAM'
import copy

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_model_state_dict, set_state_dict

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
state, before = get_optimizer_state_dict(model, optimizer), copy.deepcopy(model.state_dict())
unread = set_state_dict(model, optimizer, model_state_dict={}, optim_state_dict=state)
same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
try:
    set_model_state_dict(model, {})
    alone = "accepts it"
except RuntimeError as error:
    alone = "refuses it" if "empty" in str(error) else str(error)
print(f"torch {torch.__version__}: missing keys {unread.missing_keys}, model as before: {same}; alone: {alone}")
assert not unread.missing_keys
assert same
assert alone == "refuses it"
PROGRAM
"$folder/venv/bin/python" -W ignore "$folder/program.py"
