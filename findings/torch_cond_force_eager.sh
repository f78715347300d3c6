#!/usr/bin/env bash
# With the stance "force_eager", backward of torch.cond fails where its branches return a tensor and no tuple.
#
# Seen: backward of torch.cond: default ok, force_eager TypeError: object of type 'bool' has no len(), with tuples ok
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/python" -W ignore - <<'PROGRAM'
import torch


def backward(in_tuples):
    x = torch.ones(3, requires_grad=True)
    try:
        if in_tuples:
            torch.cond(x.sum() > 0, lambda x: (x.sin(),), lambda x: (x.cos(),), (x,))[0].sum().backward()
        else:
            torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)).sum().backward()
    except TypeError as error:
        return f"TypeError: {error}"
    assert torch.equal(x.grad, torch.ones(3).cos())
    return "ok"


seen = [backward(False)]
with torch.compiler.set_stance("force_eager"):
    seen += [backward(False), backward(True)]
print(f"torch {torch.__version__}: backward of torch.cond: default {seen[0]}, force_eager {seen[1]}, with tuples {seen[2]}")
assert seen == ["ok", "TypeError: object of type 'bool' has no len()", "ok"], seen
PROGRAM
