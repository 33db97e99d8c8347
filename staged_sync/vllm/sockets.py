"""This process' TCP sockets, seen from outside of the library that opened them.

gloo has no abort: while a broadcast is pending, destroying a ProcessGroupGloo waits in its destructor for the operation's own
timeout, and meanwhile the peers' blocked receives learn nothing (ran on torch 2.13: `abort()` and `shutdown()` are no-ops
there). Shutting the group's connections down does end it: both ends fail within a millisecond. A connection is the group's if
it runs between the endpoints that its members published for it, so that no other socket of this process is ever touched.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator
from typing import TypeAlias

Endpoint: TypeAlias = tuple[str, int]
"""IP address and port."""

_FDS = "/proc/self/fd"


def listening_endpoints() -> set[Endpoint]:
    """Where this process listens on TCP. Empty where the system has no /proc."""
    return {_endpoint(s.getsockname()) for s in _tcp_sockets() if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}


def shut_down_connections(own: Endpoint, peers: Collection[Endpoint]) -> int:
    """Shut down this process' connections between `own` (where it accepts) and `peers` (where they accept); how many.

    Either end may have dialled, so a connection is recognised by the accepting endpoint. File descriptors stay with their
    owner, who finds the connections at their end.
    """
    shut = 0
    for connection in _tcp_sockets():
        with contextlib.suppress(OSError):  # not connected, or ended meanwhile
            local, remote = _endpoint(connection.getsockname()), _endpoint(connection.getpeername())
            if local == own or (remote in peers and local not in peers):
                connection.shutdown(socket.SHUT_RDWR)
                shut += 1
    return shut


def _endpoint(address: tuple[str, int]) -> Endpoint:
    return address[0], address[1]


def _tcp_sockets() -> Iterator[socket.socket]:
    """A duplicate of each TCP socket of this process; closed when the iteration goes on."""
    try:
        fds = [int(fd) for fd in os.listdir(_FDS)]
    except OSError:
        return
    for fd in fds:
        try:
            if not os.readlink(f"{_FDS}/{fd}").startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue  # closed since the directory was read
        with duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                yield duplicate
