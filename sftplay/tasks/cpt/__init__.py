"""Continued pretraining: documents, or documents and chats in one stream, as full blocks (tasks cpt, cpt_mixed)."""
