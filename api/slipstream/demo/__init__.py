"""The bundled demo model: where it lies and what it is called.

Owns the trained artefacts in `model/` and the script that makes them (`slipstream.demo.train`).
Importing this package loads nothing heavy: no torch, no transformers, no weights.
"""

from pathlib import Path

__all__ = ["MODEL_NAME", "MODEL_PATH"]

MODEL_NAME = "slipstream-demo"
"""The name by which the command line and the API know the bundled model."""

MODEL_PATH: Path = Path(__file__).resolve().parent / "model"
"""The folder a loader of local Hugging Face models takes."""
