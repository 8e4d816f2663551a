"""What Slipstream's processes share: messages, their transport, histories, checks, statistics."""
