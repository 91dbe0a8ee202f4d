"""Recipes: weights' dtype, what is trained, optimizer and precision, searched around the planner."""
