"""Small messages between the processes of a group: one TCP connection for each pair, read by one thread.

Data goes by gloo or NCCL. What must not wait behind data, and what these cannot tell, goes here: which call a rank makes,
that a rank failed, and, by the end of a connection, that it is gone.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Store

_FRAME = struct.Struct("!II")
_GREETING = struct.Struct("!32sI")
# A peer's thread reads at once; one that does not for this long is stopped or cut off.
_SEND_TIMEOUT_S = 5.0


class Wire:
    """One rank's connections to all others.

    `receive` and `lost` are called by the reading thread, and `idle` some times a second once a connection has ended.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self.rank = rank
        self._peers = _connect(store, rank, size, timeout_s)
        self._locks = {peer: threading.Lock() for peer in self._peers}
        self._stop, self._stopped = socket.socketpair()
        self._thread: threading.Thread | None = None

    def start(
        self, receive: Callable[[int, dict[str, Any], bytes], None], lost: Callable[[int], None], idle: Callable[[], None]
    ) -> None:
        """Start the reading thread."""
        self._thread = threading.Thread(
            target=self._read, args=(receive, lost, idle), name=f"paceline-wire-{self.rank}", daemon=True
        )
        self._thread.start()

    def send(self, peer: int, message: dict[str, Any], payload: bytes = b"") -> None:
        """Send a message to a rank; one that is gone is passed over, as the reading thread learns of it by itself."""
        self._put(peer, _framed(message, payload))

    def send_all(self, message: dict[str, Any], payload: bytes = b"") -> None:
        """Send a message to every other rank."""
        data = _framed(message, payload)
        for peer in self._peers:
            self._put(peer, data)

    def _put(self, peer: int, data: bytes) -> None:
        connection = self._peers[peer]
        try:
            with self._locks[peer]:
                connection.sendall(data)
        except OSError:
            # Part of a message may have gone out, so nothing may follow it.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the reading thread and the connections."""
        # Shut down, not only closed: a loader process forked meanwhile holds copies of all sockets.
        with contextlib.suppress(OSError):
            self._stop.shutdown(socket.SHUT_RDWR)
        self._stop.close()
        if self._thread is None:
            self._hang_up()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def _hang_up(self) -> None:
        self._stopped.close()
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _read(
        self, receive: Callable[[int, dict[str, Any], bytes], None], lost: Callable[[int], None], idle: Callable[[], None]
    ) -> None:
        pending = {peer: bytearray() for peer in self._peers}
        with selectors.DefaultSelector() as selector:
            selector.register(self._stopped, selectors.EVENT_READ, None)
            for peer, connection in self._peers.items():
                selector.register(connection, selectors.EVENT_READ, peer)
            any_lost = False
            while True:
                ready = selector.select(0.25 if any_lost else None)
                for key, _ in ready:
                    if key.data is None:
                        self._hang_up()
                        return
                    data = self._chunk(key.data)
                    if not data:
                        selector.unregister(self._peers[key.data])
                        lost(key.data)
                        any_lost = True
                        continue
                    pending[key.data] += data
                    for message, payload in _unframed(pending[key.data]):
                        receive(key.data, message, payload)
                idle()

    def _chunk(self, peer: int) -> bytes:
        try:
            return self._peers[peer].recv(1 << 16)
        except OSError:
            return b""


def _framed(message: dict[str, Any], payload: bytes) -> bytes:
    head = json.dumps(message, separators=(",", ":")).encode()
    return _FRAME.pack(len(head), len(payload)) + head + payload


def _unframed(pending: bytearray) -> list[tuple[dict[str, Any], bytes]]:
    """Take the whole messages off the front of `pending`."""
    result, at = [], 0
    while len(pending) - at >= _FRAME.size:
        head, payload = _FRAME.unpack_from(pending, at)
        start, end = at + _FRAME.size, at + _FRAME.size + head + payload
        if len(pending) < end:
            break
        result.append((json.loads(pending[start : start + head]), bytes(pending[start + head : end])))
        at = end
    del pending[:at]
    return result


def _connect(store: Store, rank: int, size: int, timeout_s: float) -> dict[int, socket.socket]:
    """Return a connection to every other rank: this rank calls the lower ones, and the higher ones call it."""
    if size == 1:
        return {}
    end = time.monotonic() + timeout_s
    # The secret keeps strangers, and processes of another run on a reused port, out of the group.
    secret = secrets.token_hex(16)
    secret = store.compare_set("secret", "", secret).decode()
    peers: dict[int, socket.socket] = {}
    with _listen(size) as listener:
        address = {"host": socket.gethostname(), "addresses": _addresses(), "port": listener.getsockname()[1]}
        store.set(f"address/{rank}", json.dumps(address))
        for peer in range(rank):
            peers[peer] = _call(json.loads(store.get(f"address/{peer}")), _GREETING.pack(secret.encode(), rank), end)
        while len(peers) < size - 1:
            listener.settimeout(max(0.01, end - time.monotonic()))
            peers |= _answer(listener, secret)
    for connection in peers.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_SEND_TIMEOUT_S)
    return dict(sorted(peers.items()))


def _listen(backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def _addresses() -> list[str]:
    """Return the addresses by which other hosts may reach this one, the likeliest first."""
    found: list[str] = []
    # Asking for the route to a far address sends nothing, and tells which interface leads out.
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys(found))


def _call(address: dict[str, Any], greeting: bytes, end: float) -> socket.socket:
    """Return a connection to a listening rank, by whichever of its addresses answers with the same greeting."""
    same_host = address["host"] == socket.gethostname()
    candidates = (["127.0.0.1"] if same_host else []) + address["addresses"]
    error: OSError = OSError("it has no address")
    for candidate in candidates:
        try:
            patience = max(0.01, end - time.monotonic())
            connection = socket.create_connection((candidate, address["port"]), timeout=min(patience, 10.0))
            connection.settimeout(patience)
            connection.sendall(greeting)
            if _exactly(connection, _GREETING.size) == greeting:
                return connection
            connection.close()
        except OSError as caught:
            error = caught
    raise TimeoutError(f"host {address['host']} did not answer on port {address['port']} at any of {candidates}: {error}")


def _answer(listener: socket.socket, secret: str) -> dict[int, socket.socket]:
    """Accept one connection and return it under its rank; a stranger's is closed."""
    connection, _ = listener.accept()
    try:
        connection.settimeout(5.0)
        greeting = _exactly(connection, _GREETING.size)
        claimed, peer = _GREETING.unpack(greeting)
        if secrets.compare_digest(claimed, secret.encode()):
            connection.sendall(greeting)
            return {peer: connection}
    except (OSError, struct.error):
        pass
    connection.close()
    return {}


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            return data
        data += more
    return data
