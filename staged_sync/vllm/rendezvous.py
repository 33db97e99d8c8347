"""Where a transfer group meets: addresses, and the socket that the source binds before it tells anybody.

The source listens first and announces the port it got, so that nobody can take the port in between and an engine that is
asked to join finds somebody there. Everything about IPv4, IPv6 and host names is in `bare_host`, `url_host` and `_resolve`.
"""

from __future__ import annotations

import errno
import ipaddress
import math
import socket
from collections.abc import Callable, Sequence

from staged_sync.errors import TransportError

_DISCARD_PORT = 9
"""A UDP socket that is "connected" sends nothing; it only asks the kernel for the route. The port does not matter."""


def bare_host(host: str) -> str:
    """A host as stores and sockets want it: no scheme, no brackets, no blanks. Raises TransportError for an empty one."""
    bare = host.strip().removeprefix("tcp://").strip("/")
    if bare.startswith("[") and bare.endswith("]"):
        bare = bare[1:-1]
    if not bare:
        raise TransportError(f"an address must name a host, got {host!r}")
    return bare


def url_host(host: str) -> str:
    """A host as URLs want it: IPv6 addresses in brackets."""
    bare = bare_host(host)
    return f"[{bare}]" if ":" in bare else bare


def endpoint(host: str, port: int) -> str:
    """`host:port` for people, logs and URLs."""
    return f"{url_host(host)}:{port}"


def check_timeout(timeout_s: float) -> float:
    """`timeout_s`, where it is finite. Raises ValueError otherwise: nothing in this library waits without a deadline."""
    if not math.isfinite(timeout_s):
        raise ValueError(f"a timeout must be a finite number of seconds, got {timeout_s}")
    return timeout_s


class Listener:
    """A bound, listening TCP socket. `host` is what engines are told to dial (bare), `port` is real."""

    def __init__(self, host: str, listening: socket.socket) -> None:
        self.host = host
        self.port: int = listening.getsockname()[1]
        self.address: str = listening.getsockname()[0]
        self.on_close: Callable[[], None] | None = None
        """Set by a dial under way: closing the listener ends it."""
        self._socket: socket.socket | None = listening

    def take_socket(self) -> socket.socket:
        """Hand the socket over to a group's store. Raises TransportError where it is closed or was handed over before."""
        if self._socket is None:
            raise TransportError(f"listener {endpoint(self.host, self.port)} is closed, or a group took its socket over")
        taken, self._socket = self._socket, None
        return taken

    def close(self) -> None:
        """Release the port, and end a dial that is still under way on it. Harmless again, or after a group came up."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self.on_close is not None:
            on_close, self.on_close = self.on_close, None
            on_close()


def listen(address: str | None, port_range: tuple[int, int] | None, peers: Sequence[str] = ()) -> Listener:
    """Bind and listen on `address`, on a free port or on the first free one of `port_range` (both ends included).

    Without `address`: this host's address on the route to the first of `peers` that has one, else what this host's name
    resolves to where it can be bound, else 127.0.0.1. Raises TransportError where the address is not this host's, cannot be
    resolved, or every port of the range is taken.
    """
    host = bare_host(address) if address is not None else default_address(peers)
    family, resolved = _resolve(host)
    if ipaddress.ip_address(resolved).is_unspecified:
        raise TransportError(f"cannot announce {host!r}: it means every address of this host, and an engine cannot dial that; "
                             f"name one address that the engines can reach")
    low, high = _checked_range(port_range)
    for port in range(low, high + 1):
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((resolved, port))
            listening.listen()
            return Listener(host, listening)
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRINUSE:
                continue
            raise TransportError(
                f"cannot listen on {endpoint(host, port)} (resolved to {resolved}): {error}. The address must be one of this "
                f"host's own, that the engines can reach") from error
    ports = str(low) if low == high else f"{low}-{high}"
    raise TransportError(f"cannot listen on {url_host(host)}:{ports}: every one of these {high - low + 1} ports is taken; "
                         f"widen the port range or end what uses it")


def default_address(peers: Sequence[str]) -> str:
    """An address of this host that `peers` can be expected to reach, see `listen`."""
    for peer in peers:
        if (address := _route_to(peer)) is not None:
            return address
    try:
        named = _resolve(socket.gethostname())[1]
    except TransportError:
        return "127.0.0.1"
    return named if is_own_address(named) else "127.0.0.1"


def is_own_address(host: str) -> bool:
    """Whether this host can bind `host`."""
    try:
        family, resolved = _resolve(host)
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((resolved, 0))
    except (OSError, TransportError):
        return False
    return True


def resolved_address(host: str) -> str:
    """The IP address `host` resolves to, for error texts; the reason where it does not."""
    try:
        return _resolve(host)[1]
    except TransportError as error:
        return str(error)


def reach(host: str, port: int, *, timeout_s: float) -> str:
    """Check that somebody listens at `host:port`; the local address that the connection was made from.

    Raises TransportError at once where the connection is refused, and after `timeout_s` where nothing answers.
    """
    bare = bare_host(host)
    try:
        with socket.create_connection((bare, port), timeout=check_timeout(timeout_s)) as probe:
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TransportError(f"nobody can be reached at {endpoint(bare, port)} (resolved to {resolved_address(bare)}) within "
                             f"{timeout_s:.1f} s: {error}. Is the source still waiting there, and can this host reach it?"
                             ) from error


def _route_to(peer: str) -> str | None:
    """This host's own address on the route to `peer`, None where there is no route or no such name."""
    try:
        family, resolved = _resolve(peer)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((resolved, _DISCARD_PORT))
            return str(probe.getsockname()[0])
    except (OSError, TransportError):
        return None


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    """Address family and IP address of a host. IPv4 first, where a name has both: engines may not have IPv6."""
    bare = bare_host(host)
    try:
        found = socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise TransportError(f"host {bare!r} cannot be resolved: {error}") from error
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    scope = f"%{address[3]}" if len(address) == 4 and address[3] else ""  # a link-local IPv6 address needs its interface
    return family, f"{str(address[0]).split('%')[0]}{scope}"


def _checked_range(port_range: tuple[int, int] | None) -> tuple[int, int]:
    if port_range is None:
        return 0, 0
    low, high = port_range
    if not 1 <= low <= high <= 65535:
        raise TransportError(f"a port range must be two ports, low to high, from 1 to 65535; got {port_range!r}")
    return low, high
