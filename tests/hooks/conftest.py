"""The keepers of hooks' tests."""

from tests.checkpoint.conftest import own_keepers

__all__ = ["own_keepers"]
