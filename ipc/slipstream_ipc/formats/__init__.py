"""Formats of models' answers: reasoning, content and tool calls, described as data."""
