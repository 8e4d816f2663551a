"""Other engines' output paths, measured by programs that run in the engines' own environments.

`peer_process` runs them. The other modules are programs, and what those share: they are started by
path with another interpreter, which has none of Slipstream's packages.
"""
