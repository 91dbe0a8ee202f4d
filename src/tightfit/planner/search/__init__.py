"""The search over combinations of levers: the fastest that fits, the least, the curve, the largest value."""
