"""SFT-Play: fine-tune language models from one YAML file, on any number of processes."""

import sys

__version__ = "0.1.0"

if sys.version_info < (3, 7):  # noqa: UP036 it cannot read the modules that refuse it, such as install
    this = ".".join(map(str, sys.version_info[:2]))
    sys.stderr.write("SFT-Play needs Python 3.11 to 3.13, " + sys.executable + " is " + this + "\n")
    sys.stderr.write("  fix: make PYTHON=python3.12 ...\n")
    sys.exit(3)
