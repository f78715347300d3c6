"""Policies that move storages to the host and back, whatever the layers are."""
