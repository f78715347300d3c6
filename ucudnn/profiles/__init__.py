"""What was measured: measurements of algorithms, and recorded profiles of a GPU to plan from without it."""
