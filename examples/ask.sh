#!/bin/sh
# One answer over HTTP: from one server, from several replicas, or from replicas on Ray.
#
#   PORT=8000 examples/ask.sh
#
# The request is the same for all of them: `slipstream serve`, `serve --replicas` and `route` speak
# HTTP on this port.
exec curl --silent --show-error --fail "http://127.0.0.1:${PORT:-8000}/v1/completions" \
  --header 'Content-Type: application/json' \
  --data '{"prompt": "In Python,", "max_tokens": 60, "temperature": 0}'
