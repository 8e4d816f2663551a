"""OpenAI's /v1/responses: its items, its plans, the response object, the events of a stream."""
