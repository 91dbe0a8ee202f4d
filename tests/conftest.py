"""For all tests."""

import os

# Kineto reads this when the first profile of a process starts, and writes lines for all later ones: whichever test
# profiles first decides.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
