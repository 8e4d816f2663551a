"""Anthropic's Messages API: its JSON, its messages as those of a chat, its endpoints."""
