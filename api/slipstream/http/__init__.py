"""The HTTP front: a separate process, and a client of the output worker like any other.

`main` starts the process and `app` routes requests. `server/` listens and speaks HTTP, `openai/`
holds the endpoints and their JSON, `admin/` the metrics and the live page. HTTP status codes are
decided in `errors` and nowhere else.
"""
