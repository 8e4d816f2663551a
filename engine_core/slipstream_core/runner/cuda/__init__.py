"""Steps on a CUDA device: its threads, recorded graphs and copies to the host."""
