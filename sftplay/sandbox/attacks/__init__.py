"""Programs that try to get out, to cheat and to use things up, as data; and how they are tried on a machine."""
