"""Reporting: what was planned and how long it took, as tables, JSON and CSV."""
