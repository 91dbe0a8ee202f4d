"""Smaller models out of trained ones, and the report of what that saves and what it costs."""
