"""Loads for servers and stacks: requests, their targets, and when each is sent."""
