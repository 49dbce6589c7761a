"""The socket that a server listens on."""

from __future__ import annotations

import contextlib
import socket

from triptych.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, so that a port in use is found before a model is loaded. Raises ConfigError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with contextlib.ExitStack() as undo:
            # By this name asyncio knows TCP, and switches Nagle's algorithm off: it would hold deltas back for 40 ms.
            listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            undo.pop_all()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; try another --port"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
