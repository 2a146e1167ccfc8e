"""Checks this node and prints what it found as one line: what `unbroken check --nodes` starts on each node of a cluster."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ...errors import Exit, UnbrokenError
from .trusted import refuse_as_root
from .whole import check_this_node, leave

MARK = "unbroken-check "
"""What the line begins with: a cluster may print things of its own."""


def main() -> int:
    """Exit codes as `unbroken check`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--trusted", action="store_true")
    parser.add_argument("--within", type=float, default=5.0)
    parser.add_argument("--interface", action="append", default=[])
    parser.add_argument("--folder", action="append", type=Path, default=[])
    args, _ = parser.parse_known_args()  # clusters add what an agent would need
    try:
        if args.trusted:
            refuse_as_root()
        report = check_this_node(
            full=args.full, interfaces=args.interface, folders=args.folder, within_s=args.within
        )
    except UnbrokenError as e:
        print(f"{MARK}{json.dumps(e.as_json())}", flush=True)
        return e.exit_code
    print(f"{MARK}{json.dumps(report.as_json())}", flush=True)
    code = Exit.OK if report.fit else Exit.CHECK_FOUND_FAULT
    leave(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
