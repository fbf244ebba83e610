"""Sources of documents and chats, mixed into one stream of blocks by their shares of the learned tokens."""
