"""Asks a web address without ever following it elsewhere: a redirect would carry the key or the log to another host."""

from __future__ import annotations

import urllib.error
import urllib.parse
import urllib.request
from typing import Any


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """None for every redirect: it is then an HTTPError with its code, 301 to 308."""


_OPENER = urllib.request.build_opener(_Stay)


def open_url(request: urllib.request.Request | str, timeout: float) -> Any:
    """The open reply. Raises what `urllib.request.urlopen` raises, and HTTPError for a redirect."""
    return _OPENER.open(request, timeout=timeout)


def redirected(error: urllib.error.HTTPError) -> str | None:
    """Where a refused redirect pointed (scheme and host alone: the rest may hold a key), or None if it is none."""
    if not 300 <= error.code < 400:
        return None
    to = urllib.parse.urlsplit(error.headers.get("Location", "") if error.headers else "")
    return f"{to.scheme}://{to.hostname}" if to.hostname else "another address"


def points_elsewhere(address: str, timeout: float = 10.0) -> str | None:
    """Where an address sends whoever asks it without credentials, if that is another host; None also if it is silent.

    For clients that would follow a redirect with a header of ours, and have no switch for it (obstore): asked first.
    """
    request = urllib.request.Request(address, headers={"User-Agent": "unbroken"})
    try:
        open_url(request, timeout).close()
    except urllib.error.HTTPError as e:
        to = urllib.parse.urljoin(address, e.headers.get("Location") or address)
        there, here = urllib.parse.urlsplit(to), urllib.parse.urlsplit(address)
        if 300 <= e.code < 400 and (there.hostname, there.port) != (here.hostname, here.port):
            return redirected(e)
    except (OSError, ValueError):
        return None  # the client itself says what is wrong with it
    return None
