"""What was read from a draft head's files, in one record that prints itself."""

from __future__ import annotations

from dataclasses import dataclass

from aquiline.drafters.eagle_network import HeadConfig


@dataclass(frozen=True)
class HeadReport:
    """How a head's files were understood.

    Attributes:
        path: the folder or file.
        dialect: safeailab, speculators, vllm, sglang, modelopt, angelslim or gguf.
        files: names of the files that were read.
        config: the network's configuration.
        dtype: dtype of the stored weights.
        parameters: weights of the network, its own embedding included.
        features: which target features, and how that was found.
        vocabulary: which draft vocabulary, and how that was found.
        embedding: whose embedding is used.
        fingerprint: of the target that the head was trained for, if it says so.
        checked_against: sizes of the target it was checked against, or None.
        notes: what was assumed or left out, one sentence each.
    """

    path: str
    dialect: str
    files: tuple[str, ...]
    config: HeadConfig
    dtype: str
    parameters: int
    features: str
    vocabulary: str
    embedding: str
    fingerprint: str | None
    checked_against: str | None
    notes: tuple[str, ...] = ()

    def lines(self) -> list[tuple[str, str]]:
        """Label and value of each line."""
        config, layer, rope = self.config, self.config.layer, self.config.layer.rope
        flags = [f for f in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if getattr(config, f)]
        flags += [f for f in ("fc_bias",) if config.fc_bias] + [f for f in ("qkv_bias", "qk_norm") if getattr(layer, f)]
        rows = [
            ("head", {"eagle": "EAGLE-1/2", "eagle3": "EAGLE-3"}[config.kind] + f", {self.dialect} checkpoint"),
            ("files", ", ".join(self.files)),
            (
                "network",
                f"{config.num_layers} layer(s), hidden {layer.hidden_size}, MLP {layer.intermediate_size}, "
                f"{layer.num_heads} heads / {layer.num_kv_heads} KV of {layer.head_dim}; "
                f"{self.parameters / 1e6:.1f} M weights, {self.dtype}",
            ),
            ("switches", ", ".join(flags) or "none"),
            ("rope", f"base {rope.theta:g}, {rope.kind} scaling"),
            ("target", f"hidden {config.target_hidden_size}, {config.vocab_size} tokens"),
            ("features", f"{', '.join(str(f) for f in config.features)} ({self.features})"),
            ("drafts", f"{config.draft_vocab_size} tokens ({self.vocabulary})"),
            ("embedding", self.embedding),
            ("trained for", self.fingerprint or "not recorded"),
            ("checked", self.checked_against or "against itself only; give a target to check the fit"),
        ]
        return rows + [("note", note) for note in self.notes]

    def __str__(self) -> str:
        body = "\n".join(f"  {label:<12} {value}" for label, value in self.lines())
        return f"{self.path}\n{body}"
