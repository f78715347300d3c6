"""Storages that move in a block, so that tensors find room."""
