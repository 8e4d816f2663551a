"""`slipstream bench protocol`: deltas against whole histories on the way from core to worker."""
