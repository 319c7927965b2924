"""Latency where the kernel has no netem: two TUN devices, and threads that carry packets between them, late.

A packet that leaves one host's device is read here, kept for the latency, and written to the other host's device. The
rate is held by the queue in front of the device, so a packet comes here when its last byte would have left.
"""

import ctypes
import fcntl
import os
import struct
import threading
import time
from queue import SimpleQueue

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
LARGEST_PACKET = 65536


class Relay:
    """Makes a TUN device named `device` in each of two network namespaces, and joins them."""

    def __init__(self, namespaces: list[str], device: str, latency: float) -> None:
        self.latency = latency
        self._ends = [_make_tun(path, device) for path in namespaces]
        self._closing = False
        self._writers = []
        for source, target in (self._ends, self._ends[::-1]):
            waiting: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
            threading.Thread(target=self._read, args=(source, waiting), daemon=True).start()
            self._writers.append(threading.Thread(target=self._write, args=(target, waiting), daemon=True))
            self._writers[-1].start()

    def _read(self, source: int, waiting: "SimpleQueue[tuple[float, bytes]]") -> None:
        while True:
            try:
                packet = os.read(source, LARGEST_PACKET)
            except OSError:  # the host is gone, and its device with it
                waiting.put((0.0, b""))
                return
            waiting.put((time.monotonic() + self.latency, packet))

    def _write(self, target: int, waiting: "SimpleQueue[tuple[float, bytes]]") -> None:
        while True:
            due, packet = waiting.get()
            if not packet:
                return
            time.sleep(max(0.0, due - time.monotonic()))
            if self._closing:
                return
            try:
                os.write(target, packet)
            except OSError:  # the device is not up yet, or no more: the network lost a packet
                continue

    def close(self) -> None:
        """After the hosts have ended: their devices are gone, so the readers have stopped."""
        self._closing = True
        for writer in self._writers:
            writer.join(timeout=self.latency + 1)
        for end in self._ends:
            os.close(end)


def _make_tun(namespace: str, device: str) -> int:
    """Open a TUN device in another network namespace: from a thread that goes there and ends."""
    found: list[int | OSError] = []

    def make() -> None:
        try:
            with open(namespace) as place:
                if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns failed")
            descriptor = os.open("/dev/net/tun", os.O_RDWR)
            fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
            found.append(descriptor)
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]
