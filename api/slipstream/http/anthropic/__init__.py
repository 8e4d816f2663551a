"""Anthropic's Messages API: its JSON, and how its messages become those of a chat."""
