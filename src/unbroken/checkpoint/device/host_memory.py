"""How much memory may be taken, and taking it: pages of a memfd are allocated before anyone writes to them."""

from __future__ import annotations

import ctypes
import os

from ...machine import usable_memory

PIECE_BYTES = 128 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES = -3, 1 << 20  # of mallopt(3)


def give_large_pieces_back() -> None:
    """Makes malloc of this process return every piece above a megabyte when it is freed, in all threads.

    glibc raises that bound to the size of the first large piece that is freed (up to 32 MiB), and keeps such pieces
    from then on, one in each thread's arena. Only a help: another C library has no such call.
    """
    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    except (OSError, AttributeError):
        return


def fill_pages(fd: int, size: int) -> None:
    """Allocates all pages of a memfd, piece by piece. Raises OSError (ENOSPC, ENOMEM) instead of a later SIGBUS."""
    for start in range(0, size, PIECE_BYTES):
        os.posix_fallocate(fd, start, min(PIECE_BYTES, size - start))


def populate(address: int, size: int) -> None:
    """Enters mapped pages that are filled already into this process's page table, ten times faster than by touching them.

    Only a help: an older kernel refuses, and they are entered one by one when they are first used. Lets other threads run.
    """
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE)


def default_budget() -> int:
    """60 % of the memory that is there: snapshots must never push the trainer out."""
    return int(0.6 * usable_memory())
