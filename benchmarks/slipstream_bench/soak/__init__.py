"""`slipstream bench soak`: many short requests, and whether anything grows.

`load` makes the requests, `vanishing` is a client that is killed in the middle of its own,
`command` looks at the processes in between.
"""
