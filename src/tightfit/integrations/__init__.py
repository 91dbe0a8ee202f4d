"""Brings the plan to where users already are: thin, and none of the guests is imported before its own module is."""
