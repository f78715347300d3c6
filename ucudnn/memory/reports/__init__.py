"""What is shown of a step: who owns its peak, and what policies make of it."""
