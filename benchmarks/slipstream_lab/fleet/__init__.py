"""Placing over many replicas: its cost, and its effect in a simulation."""
