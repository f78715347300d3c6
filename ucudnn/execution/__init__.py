"""Execution: plans are prepared and launched, and another way is found after an algorithm failed."""
