"""A stream's place within its reasoning and its calls, by the ids of its tokens."""
