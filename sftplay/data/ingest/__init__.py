"""From a folder of documents to rows of text whose every character can be traced to its page."""
