"""The most positions that a step scores, and the placeholder for a missing row."""

from __future__ import annotations

NO_ROW = -1  # placeholder in a column of rows

# Prompt positions at which one step has logits: with a vocabulary of 150,000 these take 150 MB.
MAX_POSITIONS = 256
