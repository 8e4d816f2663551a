"""The endpoints of models and tokenizers: OpenAI's, Anthropic's, /generate, and resuming."""
