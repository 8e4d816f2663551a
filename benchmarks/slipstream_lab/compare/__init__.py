"""`slipstream bench compare`: Slipstream beside other engines, settings and ways of asking."""
