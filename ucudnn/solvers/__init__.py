"""Solvers: desirable sets, workspace reuse (WR) and workspace division (WD).

They know configurations and numbers only: no arrays, no GPU, no files, no clocks.
"""
