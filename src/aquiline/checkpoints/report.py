"""Describes draft heads: what they are, and how their files were interpreted."""

from __future__ import annotations

from dataclasses import dataclass

from aquiline.checkpoints.eagle.config_kinds import NORM_FLAGS
from aquiline.drafters.coupled import GAMMA
from aquiline.drafters.eagle_network import HeadConfig
from aquiline.drafters.parallel_network import ParallelConfig
from aquiline.targets.target import TargetShape

TITLES = {
    "eagle": "EAGLE-1/2",
    "eagle3": "EAGLE-3",
    "medusa": "Medusa",
    "hydra": "Hydra",
    "small-model": "small model",
}
"""Kind of head → its display name."""


@dataclass(frozen=True)
class HeadReport:
    """The interpretation of a head's files.

    Attributes:
        dialect: whose layout it is: safeailab, speculators, vllm, sglang, modelopt, angelslim or gguf for EAGLE heads;
            aquiline, FasterDecoding/Medusa or zankner/Hydra for parallel heads; transformers for a small model.
        parameters: number of weights of the network, its own embedding included.
        features: which target features it reads, and how that was found.
        fingerprint: of the target that the head was trained for, or None if unknown.
        gamma: exponent of its probabilities in coupled drafts, or None if not measured.
        checked_against: sizes of the target it was checked against, or None.
        notes: assumptions and omissions, one sentence each.
        window: committed positions that an EAGLE head sees, up to twice as many; None: all.
    """

    path: str
    kind: str
    dialect: str
    files: tuple[str, ...]
    config: HeadConfig | ParallelConfig | TargetShape
    dtype: str
    parameters: int
    features: str
    vocabulary: str
    embedding: str
    fingerprint: str | None
    gamma: float | None
    checked_against: str | None
    notes: tuple[str, ...] = ()
    window: int | None = None

    def lines(self) -> list[tuple[str, str]]:
        """Returns the label and value of each line."""
        rows = [
            ("head", f"{TITLES[self.kind]}, {self.dialect} checkpoint"),
            ("files", ", ".join(self.files)),
            *self._network(),
            ("features", self.features),
            *([("sees", f"the last {self.window:,} to {2 * self.window:,} positions")] if self.window else []),
            ("drafts", self.vocabulary),
            ("embedding", self.embedding),
            ("trained for", self.fingerprint or "not recorded"),
            ("sampling", f"drafts race with γ = {self.gamma or GAMMA:g}" + ("" if self.gamma else ", not measured")),
            ("checked", self.checked_against or "against itself only; give a target to check the fit"),
        ]
        return rows + [("note", note) for note in self.notes]

    def _network(self) -> list[tuple[str, str]]:
        weights = f"{self.parameters / 1e6:.1f} M weights, {self.dtype}"
        if isinstance(self.config, HeadConfig):
            return _eagle_lines(self.config, weights)
        if isinstance(self.config, ParallelConfig):
            heads = f"{self.config.num_heads} heads of {self.config.num_blocks} block(s)"
            sizes = f"hidden {self.config.hidden_size}, {self.config.vocab_size} tokens"
            return [("network", f"{heads}; {weights}"), ("target", sizes)]
        sizes = f"{self.config.num_layers} layer(s), hidden {self.config.hidden_size}"
        return [("network", f"{sizes}; {weights}"), ("target", f"{self.config.vocab_size} tokens")]

    def __str__(self) -> str:
        body = "\n".join(f"  {label:<12} {value}" for label, value in self.lines())
        return f"{self.path}\n{body}"


def fits(target: TargetShape | None) -> str | None:
    """Describes the target that a head was checked against."""
    if target is None:
        return None
    return f"fits a target with hidden {target.hidden_size}, {target.vocab_size} tokens, {target.num_layers} layers"


def _eagle_lines(config: HeadConfig, weights: str) -> list[tuple[str, str]]:
    layer, rope = config.layer, config.layer.rope
    flags = [f for f in (*NORM_FLAGS, "fc_bias") if getattr(config, f)] + [
        f for f in ("qkv_bias", "qk_norm") if getattr(layer, f)
    ]
    sizes = f"{config.num_layers} layer(s), hidden {layer.hidden_size}, MLP {layer.intermediate_size}"
    attention = f"{layer.num_heads} heads / {layer.num_kv_heads} KV of {layer.head_dim}"
    return [
        ("network", f"{sizes}, {attention}; {weights}"),
        ("switches", ", ".join(flags) or "none"),
        ("rope", f"base {rope.theta:g}, {rope.kind} scaling"),
        ("target", f"hidden {config.target_hidden_size}, {config.vocab_size} tokens"),
    ]
