"""`slipstream bench beside`: what a CPU engine keeps of its speed beside other processes."""
