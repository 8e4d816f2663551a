"""The engine core: schedules and runs forward passes; knows only tokens."""
