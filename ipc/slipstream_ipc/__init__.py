"""What crosses between processes: messages, links, logs, sockets."""
