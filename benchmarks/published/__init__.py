"""Predictions for graphics cards against what others have measured there and published."""
