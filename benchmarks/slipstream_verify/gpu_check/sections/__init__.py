"""The sections of a check, a module each: `run` measures a model or the machine."""
