"""Documents that are text already, plain or Markdown, and the characters of all files of text."""
