"""TLS certificates that a test makes for itself."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme


class Certificate:
    """A certificate of localhost, by an authority of its own, as files in a folder."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        issued = authority.issue_cert("localhost", "127.0.0.1")
        self.authority, self.cert, self.key = (folder / name for name in ("ca", "cert", "key"))
        authority.cert_pem.write_to_path(self.authority)
        issued.private_key_pem.write_to_path(self.key)
        self.key.chmod(0o600)
        for blob in issued.cert_chain_pems:
            blob.write_to_path(self.cert, append=True)

    def context(self) -> ssl.SSLContext:
        """A client's context, which trusts that authority alone."""
        return ssl.create_default_context(cafile=str(self.authority))
