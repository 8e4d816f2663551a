"""The endpoints that run the model, OpenAI's and others: their requests, streams and answers."""
