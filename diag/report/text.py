"""Text of strangers, made harmless for a terminal: control characters are shown, not obeyed."""

from __future__ import annotations

import unicodedata

#: Bidirectional overrides reorder what a reader sees; they are format characters and shown escaped as well.
_KEPT = {"\t"}


def printable(text: str, limit: int | None = None) -> str:
    """`text` on one line, with control, format and surrogate characters shown as \\x1b or \\u202e, cut at `limit`."""
    if not (text.isascii() and text.isprintable()):
        text = "".join(_shown(char) for char in text)
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    return text


def _shown(char: str) -> str:
    if char in _KEPT:
        return " "
    if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp", "Co", "Cn"):
        code = ord(char)
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return char
