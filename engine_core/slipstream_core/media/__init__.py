"""Images in prompts: a process that decodes them, a thread that encodes them, their places."""
