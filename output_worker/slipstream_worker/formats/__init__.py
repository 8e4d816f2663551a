"""Reads an answer's text as events: reasoning, content and tool calls. Pure."""
