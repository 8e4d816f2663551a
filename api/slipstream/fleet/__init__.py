"""Several replicas of a model behind one connection."""
