#!/usr/bin/env bash
# HiGHS prints to file descriptor 1 although output_flag is off, past Python's sys.stdout.
#
# Seen: output_flag False, sys.stdout caught '', file descriptor 1 got: Running HiGHS 1.16.0 (git hash: f3f113d) ...
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet highspy==1.16.0
"$folder/venv/bin/python" -W ignore - <<'PROGRAM' >"$folder/descriptor" 2>"$folder/told"
import contextlib
import io
import sys
from importlib.metadata import version

with contextlib.redirect_stdout(io.StringIO()) as caught:
    import highspy

    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    x = solver.addVariable(0, 1, 1)
    solver.run()
sys.stderr.write(f"highspy {version('highspy')}: output_flag False, sys.stdout caught {caught.getvalue()!r}\n")
PROGRAM
cat "$folder/told"
echo "file descriptor 1 got: $(head -c 200 "$folder/descriptor")"
test -s "$folder/descriptor"
