"""The version of the package, alone in a file so that a build can read it without importing anything."""

__version__ = "0.1.0"
