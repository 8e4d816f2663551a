"""Answers in parts: events, tool calls, and Python functions as tools."""
