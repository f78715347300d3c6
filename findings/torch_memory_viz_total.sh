#!/usr/bin/env bash
# The report `trace` of PyTorch's memory snapshots ends with a total that is the number of the last event and its size.
#
# Seen: 3 allocations of 1.0MiB, nothing freed: TOTAL MEM: 1.0MiB; after 1 is freed: TOTAL MEM: -1024.0KiB
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/python" -W ignore - <<'PROGRAM'
import torch
from torch.cuda import _memory_viz

MIB = 2**20
blocks = [
    {"address": 4096 + index * MIB, "size": MIB, "requested_size": MIB, "state": "active_allocated", "frames": []}
    for index in range(3)
]
segment = {
    "device": 0, "address": 4096, "total_size": 3 * MIB, "allocated_size": 3 * MIB, "active_size": 3 * MIB,
    "requested_size": 3 * MIB, "stream": 0, "segment_type": "large", "frames": [], "blocks": blocks,
}
events = [
    {"action": "alloc", "addr": each["address"], "size": MIB, "stream": 0, "frames": []} for each in blocks
]
freed = {"action": "free_completed", "addr": 4096, "size": MIB, "stream": 0, "frames": []}
last = []
for trace in (events, [*events, freed]):
    report = _memory_viz.trace({"segments": [segment], "device_traces": [trace]})
    last.append(report.rstrip().splitlines()[-1])
print(f"torch {torch.__version__}: 3 allocations of 1.0MiB, nothing freed: {last[0]}; after 1 is freed: {last[1]}")
assert last[0] == "TOTAL MEM: 1.0MiB" and last[1].startswith("TOTAL MEM: -")
PROGRAM
