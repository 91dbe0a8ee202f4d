"""The command line: `tightfit train`, `plan`, `estimate`, `verify`, `generate`.

The only part of the package that prints or exits. Nothing heavy is imported before a command needs it.
"""

from tightfit.cli.app import main

__all__ = ["main"]
