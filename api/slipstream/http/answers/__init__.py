"""Answers: the plan of one, its running streams, blocks, and writing it as events or whole."""
