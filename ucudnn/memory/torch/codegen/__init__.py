"""From a plan to straight-line Python."""
