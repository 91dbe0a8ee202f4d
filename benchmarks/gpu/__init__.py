"""Predictions against a real GPU: allocated and reserved peaks, and step times."""
