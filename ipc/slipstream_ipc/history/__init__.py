"""Token and text histories by row, and the cursors of their receivers."""
