#!/usr/bin/env bash
# A view of a fake tensor has another stride than that of a real one in a dimension of one entry.
#
# Seen: eager (49, 49, 7, 1), meta (49, 49, 7, 1), fake (49, 1, 7, 1); by these, eager is dense, and the fake channels last
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/python" -W ignore - <<'PROGRAM'
import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode


def pixels(device):
    tokens = torch.empty(2, 49, 1, device=device)
    return tokens.transpose(1, 2).view(2, 1, 7, 7)


with FakeTensorMode():
    fake = pixels("cpu")
found = {"eager": pixels("cpu"), "meta": pixels("meta"), "fake": fake}
print(f"torch {torch.__version__}:", {name: each.stride() for name, each in found.items()})
assert found["eager"].stride() == found["meta"].stride() == (49, 49, 7, 1)
assert fake.stride() == (49, 1, 7, 1)
forms = [suggest_memory_format(each) for each in (found["eager"], fake)]
print("forms of the eager and the fake tensor:", *forms)
assert forms == [torch.contiguous_format, torch.channels_last]
PROGRAM
