"""What an ingestion has made of a folder of documents, for people."""
