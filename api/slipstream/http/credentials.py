"""A front's API keys and certificate, read anew as their files change.

- Files are looked at in each beat, by what `stat` tells, and on the command Reload, whatever it
  tells. A secret that Kubernetes mounts changes by the link above it, which is followed.
- What cannot be used changes nothing: the keys and the certificate before it stay in force, which
  is logged once, and the files are tried again until they can be. Two that belong together, as a
  certificate and its key, are seldom replaced at the same moment.
- A key that is gone begins nothing any more; the answers that it has begun go on to their end. A
  connection keeps the certificate that it was made with.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path

from slipstream.api_key_file import KeyFiles
from slipstream.errors import SlipstreamError
from slipstream.http.auth import ApiKeys
from slipstream.http.config import FrontConfig
from slipstream.tls import tls_context
from slipstream_ipc.secret_files import check_secret

_logger = logging.getLogger(__name__)


class Credentials:
    """The files of keys and certificates that a front reloads. keys: those that its requests
    need.
    """

    def __init__(self, config: FrontConfig) -> None:
        """Raises: SlipstreamError, OSError."""
        self._config = config
        self._files = KeyFiles(config.api_key_file, config.priority_key_file, config.lora_key_file)
        self.keys = ApiKeys(())
        self._watched = [_Watched(self._files.paths, "API keys", self._read_keys)]
        self.tls: ssl.SSLContext | None = None
        self._use_tls: Callable[[ssl.SSLContext], None] | None = None
        if config.ssl_certfile is not None:
            files = tuple(filter(None, (config.ssl_certfile, config.ssl_keyfile)))
            self._watched.append(_Watched(files, "certificate", self._read_certificate))

    def on_certificate(self, use: Callable[[ssl.SSLContext], None]) -> None:
        """use: is called with the context of connections from then on."""
        self._use_tls = use

    def look(self, *, is_asked: bool = False) -> None:
        """Read what has changed; with `is_asked` everything. Call it regularly."""
        for each in self._watched:
            each.look(is_asked=is_asked)

    def _read_keys(self) -> None:
        self.keys.accept(*self._files.read(self._config.api_keys))

    def _read_certificate(self) -> None:
        certfile, keyfile = self._config.ssl_certfile, self._config.ssl_keyfile
        assert certfile is not None
        check_secret(Path(keyfile or certfile))
        self.tls = tls_context(certfile, keyfile)
        if self._use_tls is not None:
            self._use_tls(self.tls)


class _Watched:
    """Files that are read together. `read` raises OSError or SlipstreamError, and changes nothing
    then.
    """

    def __init__(self, paths: tuple[str, ...], what: str, read: Callable[[], None]) -> None:
        """Raises what `read` raises."""
        self._paths = paths
        self._what = what
        self._read = read
        self._state = self._look()  # before it is read: what is written meanwhile is another one
        self._is_wrong = False
        read()

    def look(self, *, is_asked: bool) -> None:
        state = self._look()
        has_changed = state != self._state
        if not (has_changed or is_asked or self._is_wrong):
            return
        self._state = state
        try:
            self._read()
        except (OSError, SlipstreamError) as error:
            if has_changed or is_asked:
                _logger.error("%s: what was there before stays in force: %s", self._what, error)
            self._is_wrong = True
            return
        self._is_wrong = False
        _logger.info("read anew: %s", self._what)

    def _look(self) -> list[tuple[int, ...] | None]:
        return [_state_of(path) for path in self._paths]


def _state_of(path: str) -> tuple[int, ...] | None:
    """The identity of a file's contents: differs from that of a file there before, and of itself
    before a change. None if there is no file.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
