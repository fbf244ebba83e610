"""Entry point of `python -m sftplay`."""

from sftplay.cli import main

raise SystemExit(main())
