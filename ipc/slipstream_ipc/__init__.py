"""Code shared by Slipstream's processes: messages, transport, histories, checks, statistics."""
