"""The contract between scheduler and runner: what a step computes, gives back, and travels as."""
