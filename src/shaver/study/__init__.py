"""Experiments from settings to files: what is trained, pruned and measured, and how the results are shown."""
