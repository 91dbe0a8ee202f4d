"""What a process really takes: measured, never predicted."""
