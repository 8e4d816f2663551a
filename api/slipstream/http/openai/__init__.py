"""OpenAI's API, and the endpoints beside it: what may be asked, and how it is answered."""
