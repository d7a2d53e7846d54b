"""What makes two conversations the same, and which side of the split one falls on.

Both depend on the text alone, so that they hold across files, runs, tokenizers and machines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from aquiline.training.data.conversations import Message


def conversation_id(messages: Sequence[Message]) -> str:
    """16 hex digits that depend on the roles and contents alone."""
    return _digest([[m.role, m.content] for m in messages])[:16]


def in_validation(messages: Sequence[Message], fraction: float) -> bool:
    """Whether a conversation is held out, by a hash of its first user turn."""
    first = next(m.content.strip() for m in messages if m.role == "user")
    return int(_digest(first)[:16], 16) < fraction * 2**64


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
