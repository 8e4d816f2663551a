"""The output worker: the front door of a stack; knows only text."""
