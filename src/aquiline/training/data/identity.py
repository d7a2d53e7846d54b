"""Identity of conversations, and their assignment to training or validation.

Both depend only on the text, so they are stable across files, runs, tokenizers and machines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from aquiline.training.data.conversations import Message


def conversation_id(messages: Sequence[Message]) -> str:
    """Returns 16 hex digits that depend only on what the turns say."""
    apart = ([part for part in (m.reasoning, m.tool_calls) if part] for m in messages)
    return _digest([[m.role, m.content, *more] for m, more in zip(messages, apart, strict=True)])[:16]


def in_validation(messages: Sequence[Message], fraction: float) -> bool:
    """True if a conversation is held out; decided by a hash of its first user turn."""
    first = next(m.content.strip() for m in messages if m.role == "user")
    return int(_digest(first)[:16], 16) < fraction * 2**64


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
