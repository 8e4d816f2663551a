"""The core's side of its workers: their messages, their streams, and what is sent to them."""
