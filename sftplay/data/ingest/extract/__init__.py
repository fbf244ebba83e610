"""One document of any kind -> its title and Markdown blocks with their pages."""
