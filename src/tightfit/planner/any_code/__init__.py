"""Predictions for any code, not only training steps: a callable, a loop of the user's own."""
