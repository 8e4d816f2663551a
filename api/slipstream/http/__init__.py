"""The HTTP front: a process of its own, and of the output worker only a client.

`main` starts it; `server` listens; `connection` speaks HTTP over one socket, `wire` knows what its
bytes look like; `app` finds the handler; `decoding` reads bodies into the types of `requests`;
`completions` and `chat` turn them into streams; `answer` writes what the streams say, in the types
of `responses`; `errors` is where HTTP status codes are decided, and nowhere else in Slipstream.
"""
