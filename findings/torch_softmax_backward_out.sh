#!/usr/bin/env bash
# The backward operators of softmax write an `out=` tensor as if it had no gaps, so its values and what lies between are wrong.
#
# Seen: _softmax_backward_data and _log_softmax_backward_data: 18 of 24 values of out wrong, 6 of 8 values beside it changed
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/python" -W ignore - <<'PROGRAM'
import torch

torch.manual_seed(0)
aten, seen = torch.ops.aten, {}
gradient, logits = torch.randn(4, 6), torch.randn(4, 6)
for name, output, out in (("_softmax_backward_data", logits.softmax(1), "grad_input"),
                          ("_log_softmax_backward_data", logits.log_softmax(1), "out")):
    operator = getattr(aten, name)
    expected = operator.default(gradient, output, 1, torch.float32)
    columns = torch.zeros(4, 8)  # the operator is given the first six columns
    operator.out(gradient, output, 1, torch.float32, **{out: columns[:, :6]})
    wrong = int((~torch.isclose(columns[:, :6], expected)).sum())
    seen[name] = wrong, int((columns[:, 6:] != 0).sum())
print(f"torch {torch.__version__}:", "; ".join(
    f"{name}: {wrong} of 24 values of out wrong, {beside} of 8 values beside it changed"
    for name, (wrong, beside) in seen.items()))
assert all(wrong and beside for wrong, beside in seen.values()), seen
PROGRAM
