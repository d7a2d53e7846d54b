"""Lossless speculative decoding: token for token the same output, faster.

import aquiline

loaded = aquiline.load("smollm2")
print(loaded.generate("Why is the sky blue?").text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aquiline.drafters.lookup import PromptLookup
    from aquiline.drafters.trees import Chain, DynamicTree, StaticTree
    from aquiline.engine.request import GenerationOutput, StreamEvent
    from aquiline.loading import Loaded, load
    from aquiline.sampling import LossyRule, SamplingParams
    from aquiline.stats import GenerationStats

__version__ = "0.1.0"

_HOMES = {
    "load": "loading",
    "Loaded": "loading",
    "SamplingParams": "sampling",
    "GenerationOutput": "engine.request",
    "StreamEvent": "engine.request",
    "GenerationStats": "stats",
    "Chain": "drafters.trees",
    "StaticTree": "drafters.trees",
    "DynamicTree": "drafters.trees",
    "PromptLookup": "drafters.lookup",
    "LossyRule": "sampling",
}
__all__ = [
    "Chain",
    "DynamicTree",
    "GenerationOutput",
    "GenerationStats",
    "Loaded",
    "LossyRule",
    "PromptLookup",
    "SamplingParams",
    "StaticTree",
    "StreamEvent",
    "load",
]


def __getattr__(name: str) -> Any:
    """Imports public names on first use: `import aquiline` alone does not load PyTorch."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"aquiline.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'aquiline' has no attribute {name!r}")
