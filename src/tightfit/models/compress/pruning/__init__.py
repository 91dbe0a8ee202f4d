"""Pruning: whole parts of a model taken out, or single weights set to zero."""
