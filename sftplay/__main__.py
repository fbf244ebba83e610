"""Entry point of `python -m sftplay` and of the installed `sftplay`."""

from sftplay.startup import begin_imports


def run() -> int:
    """Run the command line of this process; the exit code that docs/interfaces.md promises."""
    begin_imports()
    from sftplay.cli import main

    return main()


if __name__ == "__main__":
    raise SystemExit(run())
