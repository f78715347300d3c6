"""fit, and the step that it returns."""
