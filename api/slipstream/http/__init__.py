"""The HTTP front: a separate process, and a client of the output worker like any other.

`main` starts the process and `app` routes requests. `server/` listens and speaks HTTP,
`endpoints/` turns a request into a plan, `answers/` runs the plan and writes the answer, `openai/`
holds the JSON of both, `admin/` the metrics and the live page. HTTP status codes are decided in
`errors` and nowhere else.
"""
