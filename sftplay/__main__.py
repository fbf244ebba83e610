"""Entry point of `python -m sftplay` and of the installed `sftplay`."""

import sys

from sftplay.startup import begin_imports


def run() -> int:
    """Run the command line of this process; the exit code that docs/interfaces.md promises."""
    if sys.version_info < (3, 11):  # noqa: UP036 `make help JSON=1` runs by the user's own Python
        from sftplay.install import find_problem

        sys.stderr.write(find_problem(sys.version_info[:2]).replace("install", "python", 1) + "\n")
        return 3
    begin_imports()
    from sftplay.cli import main

    return main()


if __name__ == "__main__":
    raise SystemExit(run())
