"""A fleet: where its members are, which of them a request goes to, and when a stream moves."""
