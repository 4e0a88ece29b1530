"""A network between two ranks of which one way is slow."""

import contextlib
import json
import socket
import threading
import time
from pathlib import Path

from patience import HANG_SECONDS

from dlrm_hybrid.comm.rendezvous import share_folder

CHUNK_BYTES = 1 << 16
PAUSE_SECONDS = 0.004  # about 16 MB/s


class SlowLink:
    """What rank 0 sends to rank 1 passes through here, a piece at a time.

    Rank 0 meets the other in `near`, rank 1 in `far`.
    """

    def __init__(self, near: Path, far: Path) -> None:
        self.near, self.far = share_folder(near), share_folder(far)
        self.passed_bytes = 0
        self._threads = [threading.Thread(target=self._introduce)]
        self._threads[0].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _introduce(self) -> None:
        self.far.put("0.json", self.near.wait("0.json", HANG_SECONDS))
        values = json.loads(self.far.wait("1.json", HANG_SECONDS))
        target = values["address"].removeprefix("tcp://").split(":")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
            self.near.put("1.json", json.dumps({**values, "address": address}))
            inner, _ = listener.accept()
        outer = socket.create_connection((target[0], int(target[1])))
        # A small window, so that the sender's side holds the data, not the kernel's.
        inner.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CHUNK_BYTES)
        for source, sink, pause_seconds in [(inner, outer, PAUSE_SECONDS), (outer, inner, 0.0)]:
            thread = threading.Thread(target=self._pass, args=(source, sink, pause_seconds))
            self._threads.append(thread)
            thread.start()

    def _pass(self, source: socket.socket, sink: socket.socket, pause_seconds: float) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                time.sleep(pause_seconds)
                sink.sendall(data)
                self.passed_bytes += len(data)
            sink.shutdown(socket.SHUT_WR)
