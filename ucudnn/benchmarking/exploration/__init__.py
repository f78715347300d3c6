"""Exploration: which micro-configurations of one problem are measured, and in which order."""
