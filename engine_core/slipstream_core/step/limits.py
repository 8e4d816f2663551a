"""What a step may hold, and what stands in its columns where there is nothing."""

from __future__ import annotations

NO_ROW = -1  # in a column of rows

# Positions of prompts that one step has logits at: with a vocabulary of 150,000 they are 150 MB.
MAX_POSITIONS = 256
