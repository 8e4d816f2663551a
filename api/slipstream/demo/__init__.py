"""Demonstrations, and in `model/` the bundled demo model."""

from slipstream.demo_model import MODEL_NAME, MODEL_PATH

__all__ = ["MODEL_NAME", "MODEL_PATH"]
