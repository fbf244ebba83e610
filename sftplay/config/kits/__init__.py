"""Configs of other kits: a table of each kit's keys, and what turns a config of theirs into one of this kit."""
