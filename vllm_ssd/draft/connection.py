"""A target's end of the socket of a shared draft, and what its connection goes through.

ZeroMQ connects, and connects again, in a thread of its own, and tells of it. What it tells is read in
another thread: that a draft is gone, or that keys do not fit, is known while the target has no work.
"""

import threading
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_ssd.addresses import Keys
from vllm_ssd.transport import Channel

_LAST_PAUSE = 1000  # ms between attempts to connect, at most
_HUNG_UP = 3  # handshakes in a row that the other end broke off: no coincidence, as while it starts or ends
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_MONITOR_STOPPED
)


class Connection(Channel):
    """Queues while the draft is not there."""

    def __init__(self, address: str, keys: Keys | None = None, cores: Sequence[int] = ()) -> None:
        """`cores`: where ZeroMQ's own thread runs. `keys`: of a target."""
        self.stands = False
        """Whether the two ends are connected, and understand each other."""
        self.is_lost = False
        """It stood, and does not any more."""
        self.is_refused = False
        """The two ends do not understand each other: keys that do not fit, or no draft at all."""
        self._hung_up = 0
        self._open(zmq.DEALER, cores)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _LAST_PAUSE)
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        if keys is not None:
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.target, keys.target_secret
            self._socket.curve_serverkey = keys.draft
        monitor = self._socket.get_monitor_socket(_EVENTS)
        self._watcher = threading.Thread(target=self._watch, args=(monitor,), daemon=True)
        self._watcher.start()
        self._socket.connect(address)

    def _watch(self, monitor: zmq.Socket) -> None:
        while (event := recv_monitor_message(monitor)["event"]) != zmq.EVENT_MONITOR_STOPPED:
            stood, self.stands = self.stands, event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.is_lost = not self.stands and (stood or self.is_lost)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._hung_up = 0
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._hung_up += 1
                self.is_refused = self.is_refused or self._hung_up >= _HUNG_UP
            elif event != zmq.EVENT_DISCONNECTED:
                self.is_refused = True
        monitor.close()

    def flush_and_close(self, linger: float = 1.0) -> None:
        """Close after giving queued messages `linger` seconds to leave."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._watcher.join()
        super().flush_and_close(linger)
