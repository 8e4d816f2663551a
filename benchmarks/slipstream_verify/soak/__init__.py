"""`slipstream bench soak`: many short requests, and whether anything grows.

`soak_load` makes the requests, and `soak` measures the processes in between.
"""
