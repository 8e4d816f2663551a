"""A child process of the supervisor: how it is started, watched, replaced and ended."""
