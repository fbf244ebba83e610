"""Trees of HTML, whatever format they came from -> Markdown blocks; web pages lose their navigation first."""
