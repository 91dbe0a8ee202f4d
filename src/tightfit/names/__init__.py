"""Names that users write, and what goes with what: no torch."""
