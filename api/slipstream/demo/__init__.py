"""The bundled demo model: where it lies and what it is called.

Its weights and its tokenizer are in `model/`; `slipstream_bench.demo_model.train` makes them.
Importing this package imports neither torch nor transformers.
"""

from pathlib import Path

__all__ = ["MODEL_NAME", "MODEL_PATH"]

MODEL_NAME = "slipstream-demo"
"""The name by which the command line and the API know the bundled model."""

MODEL_PATH: Path = Path(__file__).resolve().parent / "model"
"""The folder a loader of local Hugging Face models takes."""
