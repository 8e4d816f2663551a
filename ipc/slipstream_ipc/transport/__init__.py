"""The transport between processes: sockets, encryption, codecs, links and handshakes."""
