"""Several replicas behind one address: which of them computes a request."""
