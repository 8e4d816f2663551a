"""Replicas on Ray: an actor holds each, and another one keeps as many of them as are wanted."""
