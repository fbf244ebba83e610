"""SFT-Play: fine-tune language models from one YAML file, on any number of processes."""

__version__ = "0.1.0"
