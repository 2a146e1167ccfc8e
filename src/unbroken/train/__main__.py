"""The reference trainer as a module (`python -m unbroken.train`) and as a file (`torchrun FILE`)."""

from __future__ import annotations

import os
import sys

if not __package__:
    # Started as a file: this folder is first on the path, where its modules would hide others of the same name.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != here]
    sys.path.insert(0, os.path.dirname(os.path.dirname(here)))

from unbroken.errors import Exit, UnbrokenError
from unbroken.train.config import parse
from unbroken.train.world import pin_environment


def main(argv: list[str] | None = None, prog: str = "unbroken train") -> int:
    """Runs one rank and returns its exit code; a user's mistake is one paragraph on stderr."""
    try:
        config = parse(sys.argv[1:] if argv is None else argv, prog)
        pin_environment()
        from unbroken.train.loop import train

        return train(config)
    except UnbrokenError as e:
        print(f"{prog}: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
        return e.exit_code
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


if __name__ == "__main__":
    sys.exit(main())
