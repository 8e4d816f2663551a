"""Demonstrations, and in `model/` the bundled demo model.

`slipstream_bench.demo_model.train` makes its weights and its tokenizer.
"""

from slipstream.demo_model import MODEL_NAME, MODEL_PATH

__all__ = ["MODEL_NAME", "MODEL_PATH"]
