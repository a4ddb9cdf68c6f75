"""Limits on the structure of a JSON body, checked before it is parsed.

A parser creates an object for every value, so a body of a few megabytes can take a hundred times as much memory and
block the interpreter for seconds. The scan reads the bytes once, in pieces, and creates no objects per value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vajra_py.serve.http.errors import ApiError

_PIECE = 2**17
"""Number of bytes scanned before other threads get a turn; this takes about half a millisecond."""
_QUOTE, _COMMA = b'",'
_OPENING, _CLOSING = b"[{", b"]}"


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """Limits on a body's structure.

    Attributes:
        max_values: maximum number of values: numbers, strings, arrays, objects and so on.
        max_containers: maximum number of arrays and objects.
        max_depth: maximum nesting depth of arrays and objects.
    """

    max_values: int
    max_containers: int
    max_depth: int = 64


def check_structure(body: bytes | bytearray, limits: JsonLimits) -> None:
    """Raise `ApiError` if the body has more values, arrays and objects, or levels of nesting than allowed.

    Contents of strings do not count. A body that is not JSON may pass; the parser then refuses it.
    """
    num_values, num_containers, depth = 1, 0, 0
    in_string, escaped = False, False
    for start in range(0, len(body), _PIECE):
        piece = bytes(body[start : start + _PIECE])
        if escaped:
            piece = b" " + piece[1:]
        piece = piece.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
        escaped = piece.endswith(b"\\")
        codes = np.frombuffer(piece, np.uint8)
        inside = np.bitwise_xor.accumulate(codes == _QUOTE) ^ in_string
        in_string = bool(inside[-1])
        outside = ~inside
        opens = ((codes == _OPENING[0]) | (codes == _OPENING[1])) & outside
        closes = ((codes == _CLOSING[0]) | (codes == _CLOSING[1])) & outside
        num_opens = int(np.count_nonzero(opens))
        num_containers += num_opens
        num_values += num_opens + int(np.count_nonzero((codes == _COMMA) & outside))
        if num_opens:
            levels = np.cumsum(opens.astype(np.int32) - closes)
            deepest = depth + int(levels.max())
            depth += int(levels[-1])
            _check("is nested too deeply", "levels", deepest, limits.max_depth)
        else:
            depth -= int(np.count_nonzero(closes))
        _check("has too many arrays and objects", "them", num_containers, limits.max_containers)
        _check("has too many values", "values", num_values, limits.max_values)


def _check(problem: str, unit: str, got: int, most: int) -> None:
    if got > most:
        text = f"the body {problem} (more than {most}). Allowed: up to {most} of {unit}"
        raise ApiError(400, text, code="too_complex")
