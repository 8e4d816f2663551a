"""The text and the training of the bundled demo model."""
