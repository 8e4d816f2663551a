"""Log-probabilities as JSON, in OpenAI's shapes and by token id, with the texts of tokens."""
