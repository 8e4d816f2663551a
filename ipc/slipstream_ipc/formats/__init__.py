"""How models write answers: reasoning, content and tool calls, described as data."""
