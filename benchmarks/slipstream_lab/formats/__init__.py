"""`slipstream bench formats`: what reading an answer as reasoning, content and calls costs."""
