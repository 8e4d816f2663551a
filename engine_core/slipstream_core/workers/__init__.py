"""The core's side of its workers: their messages, their streams, what they are sent."""
