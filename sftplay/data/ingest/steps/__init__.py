"""What is done to one file or to one part of the text, each in a child process of its own."""
