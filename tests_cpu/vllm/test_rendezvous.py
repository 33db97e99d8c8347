"""Addresses and listening sockets."""

from __future__ import annotations

import math
import socket
from contextlib import closing

import pytest

from staged_sync.errors import TransportError
from staged_sync.vllm import rendezvous
from staged_sync.vllm.rendezvous import bare_host, check_timeout, default_address, endpoint, is_own_address, listen, reach


def has_ipv6() -> bool:
    return is_own_address("::1")


@pytest.mark.parametrize(("given", "bare", "shown"), [
    ("10.0.0.1", "10.0.0.1", "10.0.0.1:5"),
    (" trainer-0.pool ", "trainer-0.pool", "trainer-0.pool:5"),
    ("[fd00::2]", "fd00::2", "[fd00::2]:5"),
    ("fd00::2", "fd00::2", "[fd00::2]:5"),
    ("tcp://[::1]", "::1", "[::1]:5"),
    ("tcp://host/", "host", "host:5"),
])
def test_hosts_are_bare_for_sockets_and_bracketed_for_people(given: str, bare: str, shown: str) -> None:
    assert bare_host(given) == bare
    assert endpoint(given, 5) == shown


@pytest.mark.parametrize("empty", ["", "  ", "[]", "tcp://"])
def test_an_empty_host_is_refused(empty: str) -> None:
    with pytest.raises(TransportError, match="must name a host"):
        bare_host(empty)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1", "[::1]"])
def test_what_is_announced_can_be_dialled(address: str) -> None:
    if ":" in address and not has_ipv6():
        pytest.skip("this host has no IPv6")
    with closing(listen(address, None)) as listener:
        assert listener.host == bare_host(address)
        assert listener.port > 0
        reach(listener.host, listener.port, timeout_s=5)


def test_the_default_address_can_be_dialled() -> None:
    with closing(listen(None, None)) as listener:
        reach(listener.host, listener.port, timeout_s=5)


def test_the_default_address_is_the_one_on_the_route_to_a_peer() -> None:
    assert default_address(["no-such-host.invalid", "127.0.0.1"]) == "127.0.0.1"


def test_a_host_whose_name_means_another_machine_falls_back_to_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "198.51.100.7")  # a documentation address: nobody's
    assert default_address([]) == "127.0.0.1"
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert default_address([]) == "127.0.0.1"


def test_a_port_of_the_range_is_taken_in_order() -> None:
    with closing(listen("127.0.0.1", None)) as taken:
        low = taken.port
        with closing(listen("127.0.0.1", (low, min(low + 50, 65535)))) as listener:
            assert low < listener.port <= low + 50


def test_a_range_whose_ports_are_all_taken_is_named() -> None:
    with closing(listen("127.0.0.1", None)) as taken, \
            pytest.raises(TransportError, match=rf"127\.0\.0\.1:{taken.port}: every one of these 1 ports is taken"):
        listen("127.0.0.1", (taken.port, taken.port))


@pytest.mark.parametrize("bad", [(0, 10), (10, 9), (1, 65536)])
def test_a_range_that_is_none_is_refused(bad: tuple[int, int]) -> None:
    with pytest.raises(TransportError, match="two ports, low to high"):
        listen("127.0.0.1", bad)


@pytest.mark.parametrize(("address", "text"), [
    ("198.51.100.7", r"cannot listen on 198\.51\.100\.7:0 .*must be one of this host's own"),
    ("no-such-host.invalid", "'no-such-host.invalid' cannot be resolved"),
    ("0.0.0.0", "an engine cannot dial that"),
])
def test_an_address_that_engines_cannot_dial_is_refused(address: str, text: str) -> None:
    with pytest.raises(TransportError, match=text):
        listen(address, None)


def test_a_closed_listener_is_gone_and_closing_again_is_harmless() -> None:
    listener = listen("127.0.0.1", None)
    listener.close()
    listener.close()
    with pytest.raises(TransportError, match=rf"nobody can be reached at 127\.0\.0\.1:{listener.port}"):
        reach("127.0.0.1", listener.port, timeout_s=5)
    with pytest.raises(TransportError, match="is closed"):
        listener.take_socket()


def test_only_one_group_can_have_the_socket() -> None:
    listener = listen("127.0.0.1", None)
    with listener.take_socket(), pytest.raises(TransportError, match="took its socket over"):
        listener.take_socket()


def test_resolution_is_told_in_errors() -> None:
    assert rendezvous.resolved_address("localhost") in ("127.0.0.1", "::1")
    assert "cannot be resolved" in rendezvous.resolved_address("no-such-host.invalid")


@pytest.mark.parametrize("endless", [math.inf, math.nan])
def test_endless_timeouts_are_refused(endless: float) -> None:
    with pytest.raises(ValueError, match="finite number of seconds"):
        check_timeout(endless)
