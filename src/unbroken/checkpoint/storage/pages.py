"""Memory for pieces of files, given back to the system as soon as nobody looks at it."""

from __future__ import annotations

import mmap


def scratch_pages(size: int) -> memoryview:
    """`size` bytes of zeroed memory of their own, given back to the system when the last view of them is gone.

    For pieces of many megabytes in threads: malloc would keep such a piece in the arena of every thread that ever
    had one. Page-aligned, so a file can be read into it past the page cache.
    """
    return memoryview(mmap.mmap(-1, max(1, size)))[:size]
