"""What `unbroken train` does with its command line; scripts with parts of their own call it with those."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import Exit, UnbrokenError
from .config import parse
from .world import pin_environment

if TYPE_CHECKING:
    from .callbacks import Callback
    from .training import OpenCorpus, OpenTraining


def main(
    argv: list[str] | None = None,
    prog: str = "unbroken train",
    *,
    open_data: OpenCorpus | None = None,
    open_trainer: OpenTraining | None = None,
    callbacks: Sequence[Callback] = (),
) -> int:
    """Runs one rank and returns its exit code; a user's mistake is one paragraph on stderr. Parts that are given stand in the
    place of ours (`unbroken.train.loop.train`).

    A training that fails ends this process at once, with the traceback or paragraph printed: waiting for what
    other ranks will never finish would only hold up whoever restarts it.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] == ["plan"]:
            from .planning.command import main as plan

            return plan(argv[1:])
        if argv[:1] == ["tokenize"]:
            from .corpus.tokenize import main as tokenize

            return tokenize(argv[1:])
        if argv[:1] == ["profile"]:
            from .profiling.command import main as profile

            return profile(argv[1:])
        config = parse(argv, prog)
    except UnbrokenError as e:
        if "--json" in argv:
            print(json.dumps(e.as_json()), flush=True)
        return _say(prog, e)
    if config.run.mode == "deterministic":
        pin_environment()
    from .loop import train

    given: dict[str, Any] = {"open_data": open_data, "open_trainer": open_trainer}
    try:
        return train(config, callbacks=callbacks, **{k: v for k, v in given.items() if v is not None})
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
