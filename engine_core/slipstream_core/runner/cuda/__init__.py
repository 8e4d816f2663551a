"""Steps on a CUDA device: its threads, recorded graphs, copies back."""
