"""The steps on one file or one part of the text, each in its own child process."""
