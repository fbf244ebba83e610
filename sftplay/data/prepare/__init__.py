"""One pass over the files: rows in, token rows on disk, every record counted."""
