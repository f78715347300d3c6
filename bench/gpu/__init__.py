"""The handle on a GPU."""
