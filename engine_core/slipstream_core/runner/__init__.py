"""Runs models for the core: loading, attention over the paged cache, sampling."""
