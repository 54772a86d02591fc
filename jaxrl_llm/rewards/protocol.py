"""Messages between the trainer and its reward workers: a length and JSON. Nothing from a worker is unpickled.

Trainer to worker, first ``Setup`` as a dict, then batches ``[[sample, first_reward, prompt, completion, answer,
metadata], …]``. Worker to trainer: ``{"ready": true}`` or ``{"error": text}`` once, then for each sample and each
reward from ``first_reward`` on, in order and as soon as it is known, ``[sample, reward, score, parts, error]``.
That stream is also how the trainer knows which call a silent worker is stuck in.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct(">I")


def encode(message: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """One message as bytes. ``default`` makes plain values of others.

    Raises:
      TypeError: the message holds something that is not JSON.
    """
    body = json.dumps(message, default=default, separators=(",", ":")).encode("ascii")
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that ``data`` completes."""
        self._buffer += data
        messages, start = [], 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            messages.append(json.loads(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return messages
