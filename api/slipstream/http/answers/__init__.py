"""Answers: the plan of one, its running streams, and writing it as a stream of events or whole."""
