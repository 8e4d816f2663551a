"""A simulated device and model: time passes and tokens come, but nothing is computed."""
