"""Scanners of the arguments of a call: text in pieces to JSON in pieces."""
