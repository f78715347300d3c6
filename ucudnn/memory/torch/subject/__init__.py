"""The subject of a step: the model, its arguments and outputs, and checks that a plan can train it."""
