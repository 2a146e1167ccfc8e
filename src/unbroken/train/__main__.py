"""The reference trainer as a module (`python -m unbroken.train`) and as a file (`torchrun FILE`)."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import NoReturn

if not __package__:
    # Started as a file: this folder is first on the path, where its modules would hide others of the same name.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != here]
    sys.path.insert(0, os.path.dirname(os.path.dirname(here)))

from unbroken.errors import Exit, UnbrokenError
from unbroken.train.config import parse
from unbroken.train.world import pin_environment


def main(argv: list[str] | None = None, prog: str = "unbroken train") -> int:
    """Runs one rank and returns its exit code; a user's mistake is one paragraph on stderr.

    A training that fails ends this process at once, with the traceback or paragraph printed: waiting for what
    other ranks will never finish would only hold up whoever restarts it.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] == ["plan"]:
            from unbroken.train.planning.command import main as plan

            return plan(argv[1:])
        if argv[:1] == ["tokenize"]:
            from unbroken.train.corpus.tokenize import main as tokenize

            return tokenize(argv[1:])
        if argv[:1] == ["profile"]:
            from unbroken.train.profiling.command import main as profile

            return profile(argv[1:])
        config = parse(argv, prog)
    except UnbrokenError as e:
        return _say(prog, e)
    if config.run.mode == "deterministic":
        pin_environment()
    from unbroken.train.loop import train

    try:
        return train(config)
    except UnbrokenError as e:
        _end(_say(prog, e))
    except KeyboardInterrupt:
        _end(Exit.INTERRUPTED)
    except BrokenPipeError:  # `| head`: nobody reads on
        _end(1)
    except Exception:  # noqa: BLE001  printed as Python would, and the process ends with it
        traceback.print_exc()
        _end(1)


def _say(prog: str, e: UnbrokenError) -> int:
    print(f"{prog}: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
    return e.exit_code


def _end(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader of our output may have gone
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
