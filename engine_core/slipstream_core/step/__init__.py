"""What scheduler and runner both know of a step."""
