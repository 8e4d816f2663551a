"""Links, sockets and handshakes between processes."""
