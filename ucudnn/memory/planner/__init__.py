"""The planner: which policy's plan keeps a budget, and is the fastest."""
