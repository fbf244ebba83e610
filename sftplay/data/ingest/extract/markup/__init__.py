"""HTML, and what is made to HTML on the way -> Markdown blocks; web pages lose their navigation first."""
