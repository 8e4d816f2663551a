"""The options of commands, and where their values come from: arguments, environment, a file."""
