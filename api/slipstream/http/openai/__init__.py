"""OpenAI's JSON: the types of request and response bodies, log-probabilities and token texts."""
