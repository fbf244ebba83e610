"""Documents that are text already: plain text, Markdown, reStructuredText, and the characters of all of them."""
