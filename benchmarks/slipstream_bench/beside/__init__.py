"""`slipstream bench beside`: the share of its speed that a CPU engine keeps
beside other processes.
"""
