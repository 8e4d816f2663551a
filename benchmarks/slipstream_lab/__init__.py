"""Experiments behind the docs' tables, and the programs that made them: not in the wheel."""
