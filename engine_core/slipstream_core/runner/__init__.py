"""How the core runs models: loading, attention over the paged cache, sampling."""
