"""One training on several ranks that each hold a part of every weight (FSDP2)."""
