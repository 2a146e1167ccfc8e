"""Unbroken keeps the development of large language models running."""

from .version import __version__

__all__ = ["__version__"]
