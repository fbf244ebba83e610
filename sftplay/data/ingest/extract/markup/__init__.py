"""Convert HTML, and formats that become HTML first, to Markdown blocks; navigation of web pages is removed."""
