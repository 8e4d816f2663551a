"""The contract between scheduler and runner: what a step computes and gives back."""
