"""`slipstream bench soak`: many short requests, and whether anything grows.

`soak_load` makes the requests, `vanishing` is a client that is killed while its streams run, and
`soak` measures the processes in between.
"""
