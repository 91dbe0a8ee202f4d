"""The memory that a process really uses: measured, never predicted."""
