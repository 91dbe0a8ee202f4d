"""The version of the package: `tightfit.__version__`, which also pyproject.toml states."""

VERSION = "0.1.0"
