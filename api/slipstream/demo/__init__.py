"""Demonstrations, and the files of the bundled demo model in `model/` (`slipstream.demo_model`)."""
