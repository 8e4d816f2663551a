"""Quantised checkpoints in safetensors files, read as the codes that they hold."""
