"""Plans of a training step: actions, validity, where bytes are freed, what recomputation runs again."""
