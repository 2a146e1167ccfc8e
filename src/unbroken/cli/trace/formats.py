"""`unbroken trace formats`: what can be read."""

from __future__ import annotations

import json

from .options import Json


def formats(as_json: Json = False) -> None:
    """List the formats that are read, and the keys of --map."""
    from ...trace.readers import READERS
    from ...trace.readers.table import KEYS

    keys = {k: schema for k, (schema, _) in KEYS.items() if k != "job"}
    if as_json:
        print(json.dumps({"formats": {r.name: r.title for r in READERS}, "map": keys}))
        return
    width = max(len(r.name) for r in READERS)
    for r in READERS:
        print(f"{r.name:<{width}}  {r.title}")
    print("\nKeys of --map KEY=COLUMN: " + ", ".join(keys))
