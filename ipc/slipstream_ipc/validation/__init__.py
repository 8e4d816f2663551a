"""Checks of what a request may ask for, made early by clients and again by the worker."""
