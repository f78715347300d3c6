#!/usr/bin/env bash
# A post-accumulate-grad hook that leads back to its own parameter keeps it for ever: the collector of garbage does not see it.
#
# Seen: still there after gc.collect(): none False, register_hook False, register_post_accumulate_grad_hook True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/python" -W ignore - <<'PROGRAM'
import gc
import weakref

import torch


class Owner:
    def __init__(self, register):
        self.weight = torch.nn.Parameter(torch.ones(3))
        if register:
            getattr(self.weight, register)(self.noted)

    def noted(self, gradient):
        pass


seen = {}
for register in ("", "register_hook", "register_post_accumulate_grad_hook"):
    owner = Owner(register)
    owner.weight.sum().backward()
    left = weakref.ref(owner.weight)
    del owner
    for _ in range(3):
        gc.collect()
    seen[register or "none"] = left() is not None
print(f"torch {torch.__version__}: still there after gc.collect():", ", ".join(f"{key} {value}" for key, value in seen.items()))
assert seen == {"none": False, "register_hook": False, "register_post_accumulate_grad_hook": True}, seen
PROGRAM
