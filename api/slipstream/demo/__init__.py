"""Demonstrations, and in `model/` the bundled demo model (`slipstream.demo_model`)."""
