"""The user's screen: lines, a live line below them, colours."""
