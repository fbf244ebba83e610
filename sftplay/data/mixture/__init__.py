"""Mixtures of documents and chats in exact shares, as blocks of full length."""
