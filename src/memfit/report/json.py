"""JSON as the outside reads it: one object, English keys, finite figures only (NaN becomes null)."""

from __future__ import annotations

from typing import Any

import msgspec


def dumps(obj: Any, *, indent: int = 2) -> str:
    """``obj`` (nouns of ``core``, dictionaries, lists, paths) as JSON text."""
    # msgspec writes NaN and infinities as null, which is the only form that every JSON reader accepts.
    return msgspec.json.format(msgspec.json.encode(obj, enc_hook=str), indent=indent).decode()


def dumps_for_script(obj: Any) -> str:
    """JSON that may stand in a ``<script>`` element: no text in it can close the element or open a comment.

    See https://html.spec.whatwg.org/multipage/scripting.html#restrictions-for-contents-of-script-elements.
    """
    text = dumps(obj, indent=-1)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
