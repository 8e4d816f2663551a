"""Metrics, and the live page with its numbers."""
