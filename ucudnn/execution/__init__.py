"""Execution: plans are prepared, launched, and repaired where an algorithm fails."""
