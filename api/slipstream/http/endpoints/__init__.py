"""The endpoints that run the model or its tokenizer: OpenAI's, /generate, and resuming."""
