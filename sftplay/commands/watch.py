"""Show something again every two seconds until Ctrl-C, for the verbs that take --watch."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable

from sftplay import log
from sftplay.errors import ConfigError

PAUSE_S = 2.0


def refuse_watched_json(args: Namespace) -> None:
    """Raise ConfigError where --json, which is one document, comes with --watch."""
    if args.watch and args.json:
        raise ConfigError("--watch and --json do not go together", where="command line", fix="leave one out")


def watch(args: Namespace, show: Callable[[], None]) -> int:
    """Call `show` once, or with --watch until Ctrl-C or until nobody reads it; return the exit code 0."""
    refuse_watched_json(args)
    if not args.watch:
        show()
        return 0
    try:
        while (screen := log.own_screen()) is None or screen.is_read:
            if sys.stdout.isatty():
                sys.stdout.write("\x1b[H\x1b[J")  # the cursor goes to the top left corner, the terminal is cleared
            show()
            time.sleep(PAUSE_S)
    except KeyboardInterrupt:
        pass
    return 0
