"""Handlers of models' routes that all APIs share; resuming; the API's description."""
