"""File descriptors of the process, and what the kernel reports about its sockets."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import resource
import select
import sys
import termios

_log = logging.getLogger(__name__)
_OTHER_DESCRIPTORS = 256
"""Number of file descriptors reserved for other uses than connections: listeners, workers, logs, recordings."""
_GONE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


def most_connections(wanted: int, most_sent_on: int = 0) -> int:
    """Return the number of connections, up to `wanted`, for which the process has file descriptors.

    Up to `most_sent_on` connections each need a second descriptor, for a connection to another server. The process's
    limit is raised first, if that is permitted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + min(wanted, most_sent_on) + _OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        if raised > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft == resource.RLIM_INFINITY:
        return wanted
    left = max(soft - _OTHER_DESCRIPTORS, soft // 2, 1)
    most = max(left - most_sent_on, left // 2, 1)
    if most < wanted:
        _log.warning("at most %d connections: the limit of open files is %d", most, soft)
    return most


def num_undelivered(transport: asyncio.Transport) -> int:
    """Return the number of sent bytes that the kernel has not delivered yet; 0 if the system does not state it."""
    try:
        descriptor = transport.get_extra_info("socket").fileno()
        return int.from_bytes(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):  # not supported, or the socket was closed by this process
        return 0


def is_closed_by_client(transport: asyncio.Transport) -> bool:
    """Return True if the connection is closed; this is detected without reading from the socket."""
    poll = select.poll()
    try:
        poll.register(transport.get_extra_info("socket").fileno(), _GONE)
    except ValueError:  # the socket was closed by this process
        return True
    return bool(poll.poll(0))
