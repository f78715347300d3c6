"""What the C++ handle costs."""
