"""The public face of Slipstream."""
