"""Office documents, which are XML in a zip archive: texts, slides and sheets of Word and OpenDocument."""
