"""OpenAI's /v1/responses: its items, the response object, and the events of a stream."""
