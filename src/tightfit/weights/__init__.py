"""Weights that are held in few bits."""
