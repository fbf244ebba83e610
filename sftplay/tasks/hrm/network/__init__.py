"""The recurrent model itself: layers, puzzle embeddings, one segment, and the model of a finished run on disk."""
