"""A simulated device and model: time passes, tokens come, nothing is computed."""
