"""Tests of the checks of outputs."""
