"""The name and the folder of the bundled demo model."""

from __future__ import annotations

from pathlib import Path

MODEL_NAME = "slipstream-demo"
"""The name by which the command line and the API know it."""

MODEL_PATH = Path(__file__).resolve().parent / "demo" / "model"
"""The folder, as a loader of local Hugging Face models takes it."""
