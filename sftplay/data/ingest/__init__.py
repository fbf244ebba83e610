"""Turn a folder of documents into rows of text, in which every character can be traced to its page."""
