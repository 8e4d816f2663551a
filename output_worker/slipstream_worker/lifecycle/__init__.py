"""A stream's stages, and what each message of a client and of the core does to it."""
