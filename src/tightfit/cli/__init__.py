"""The command line: the only part of the package that prints or exits.

Nothing heavy is imported before a command needs it.
"""

from tightfit.cli.entry import command as main

__all__ = ["main"]
