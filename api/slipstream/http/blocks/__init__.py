"""Answers as blocks: content, reasoning and calls as items that begin, grow and end."""
