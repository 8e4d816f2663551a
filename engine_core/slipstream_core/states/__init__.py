"""Recurrent states of hybrid models: which modules carry them, and where each request's are."""
