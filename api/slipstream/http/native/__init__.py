"""The endpoints that no other API has: /generate, /abort, /tokenize, /detokenize."""
