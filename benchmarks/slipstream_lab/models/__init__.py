"""Models and tokenizers in small, and the tables of which ones are served exactly."""
