"""Scheduling: the requests that a step computes, and the columns of its plan."""
