"""Adapts any causal language model of transformers to `Target`, through transformers' own modeling code.

The model is never modified: it receives our cache, explicit positions and one additive mask per
kind of layer as arguments. A probe at construction decides whether this is exact: a ragged tree
forward must give the logits of the model's own plain forward.

Mixture-of-experts models work too. Each node of a tree chooses its own experts, so the weights that
a step reads grow with the number of nodes; short chains pay sooner than trees there.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from aquiline.cache import KVCache, new_cache
from aquiline.targets.attention import Placement, attention_mask, place
from aquiline.targets.decoder import gather_positions
from aquiline.targets.hf_checks import (
    base_model,
    check_model,
    head_rule,
    mask_windows,
    position_limit,
    unwrap,
    window_size,
)
from aquiline.targets.hf_decoder import PROBE_TOKENS, difference, probe_ids, shared_decoder, tolerance
from aquiline.targets.target import Target, TargetInput, TargetOutput, TargetShape, check_features


class HFTarget:
    """Adapts a transformers causal LM to `Target`.

    Quantised models, PEFT adapters and models spread over devices work unchanged; a layer's keys and
    values lie on the device that computes it.

    Args:
        model: a causal LM in eval mode, or a PEFT wrapper of one.

    Raises:
        TypeError: if `model` is not a transformers model.
        ValueError: for a model that cannot verify a tree, with the reason and the remedy.
    """

    exact = False

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = unwrap(model)
        check_model(self.model)
        config = self.model.config
        self._base = base_model(self.model)
        self._head = self.model.get_output_embeddings()
        self._rule = head_rule(config)
        limit, self._clamped = position_limit(config)
        accepts = inspect.signature(self._base.forward).parameters
        old_name = "cache" not in accepts and "past_key_values" in accepts  # Before transformers 5.2x.
        self._cache_name = "past_key_values" if old_name else "cache"
        self.device = _device(self.model)
        try:
            self._measure(config, limit)
            self.windows = self._find_windows(config)
            self._confirm(model)
        except (RuntimeError, TypeError, AttributeError, LookupError) as error:
            name, reason = type(self.model).__name__, (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"{name} cannot run with Aquiline's cache ({reason}); decode it with transformers"
            ) from error

    @torch.no_grad()
    def _measure(self, config: Any, limit: int) -> None:
        """Runs one token to measure sizes and dtypes, which configurations state in many ways."""
        from aquiline.targets.hf_cache import recorded_slots, recording_cache

        cache = recording_cache()
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        out = self._base(tokens, use_cache=True, return_dict=True, **{self._cache_name: cache})
        final = out.last_hidden_state.to(self.device)
        self._slots = recorded_slots(cache)
        if not self._slots:
            raise ValueError(f"{type(self.model).__name__} put no keys into its cache; decode it with transformers")
        self._cache_dtype = cache.layers[min(self._slots)].keys.dtype
        self.dtype = final.dtype
        vocab = self.project(final).shape[-1]
        self.shape = TargetShape(vocab, final.shape[-1], config.num_hidden_layers, limit)

    @torch.no_grad()
    def _find_windows(self, config: Any) -> dict[str, int | None]:
        """Determines whether the model applies the sliding window in its configuration.

        Two tokens run after an artificial context that is longer than the window. It holds zeros,
        except for large values in the slots that the window hides, so the output shows whether they
        are visible. Our mask must give the same output as the model's own.
        """
        window = window_size(config)
        if window is None or window >= self.shape.max_positions:
            return {"": None}
        start = window + 2
        cache = self.new_cache(1, start + 2)
        for part in (cache, *cache.parts):
            part.key_block[:, :, :, :4] = 1.0
            part.value_block[:, :, :, :4] = window
        cache.lengths[0] = start
        tokens = torch.tensor([[1, 2]], device=self.device)
        positions = torch.arange(start, start + 2, device=self.device)[None]
        inputs, placement = TargetInput(tokens, positions, None, cache, [0]), place(cache, [0], 2)
        expected = self._run(inputs, placement, None).last_hidden_state
        unused: dict[str, int | None] = {"": None}
        for windows in (mask_windows(config), unused):
            self.windows = windows
            found = self._run(inputs, placement, self._masks(inputs, placement)).last_hidden_state
            if difference(found, expected) <= tolerance(self.dtype, 0.02):
                return windows
        raise ValueError(
            f"{type(self.model).__name__} applies its sliding window of {window} in an unknown way; "
            "decode it with transformers"
        )

    @torch.no_grad()
    def _confirm(self, model: nn.Module) -> None:
        """Compares a ragged tree forward with the model's own plain forwards.

        Row 0 holds 1 token and row 1 holds 3; both then run a root with two children in one
        forward. The second child must see the prefix and the root, and not its sibling.
        """
        vocab, name = self.shape.vocab_size, type(model).__name__
        ids = probe_ids(vocab, self.device)
        cache = self.new_cache(2, PROBE_TOKENS)
        positions = torch.arange(3, device=self.device)[None]
        none = torch.empty(1, 0, dtype=torch.int64, device=self.device)
        self.forward(TargetInput(ids[None, :3], positions, None, cache, [1], logits_at=none))
        self.forward(TargetInput(ids[None, :1], positions[:, :1], None, cache, [0], logits_at=none))
        cache.lengths[:] = torch.tensor([1, 3])
        tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool, device=self.device)
        depths = torch.tensor([[1, 2, 2], [3, 4, 4]], device=self.device)
        out = self.forward(TargetInput(ids[None, 3:].expand(2, -1), depths, tree.expand(2, -1, -1), cache, [0, 1]))
        for row, prefix in enumerate((ids[:1], ids[:3])):
            sequence = torch.cat((prefix, ids[3:4], ids[5:]))[None]
            reference = model(input_ids=sequence, use_cache=False).logits[0, -1].to(self.device)
            own = self._base(sequence, use_cache=False, return_dict=True).last_hidden_state[0, -1]
            if difference(self.project(own.to(self.device)), reference) > tolerance(self.dtype, 1e-2):
                raise ValueError(
                    f"{name} computes logits from hidden states in an unknown way; decode it with transformers"
                )
            if difference(out.logits[row, 2], reference) > tolerance(self.dtype, 0.15):
                raise ValueError(
                    f"{name} computes a draft tree differently from plain text (its attention ignores the "
                    "mask or the positions, or it quantises activations over the whole batch); "
                    "load it with attn_implementation='eager', or decode it with transformers"
                )

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        devices = list(dict.fromkeys(slot.device for slot in self._slots.values()))
        home, *parts = [self._device_cache(device, rows, capacity) for device in devices]
        return replace(home, parts=tuple(replace(part, lengths=home.lengths) for part in parts))

    def _device_cache(self, device: torch.device, rows: int, capacity: int) -> KVCache:
        slots = [slot for slot in self._slots.values() if slot.device == device]
        return new_cache(
            layers=len(slots),
            rows=rows,
            kv_heads=max(slot.heads for slot in slots),
            key_dim=max(slot.key_dim for slot in slots),
            value_dim=max(slot.value_dim for slot in slots),
            capacity=capacity,
            max_capacity=self.shape.max_positions,
            dtype=self._cache_dtype,
            device=device,
        )

    @torch.no_grad()
    def forward(self, inputs: TargetInput) -> TargetOutput:
        """Implements `Target.forward`.

        Raises:
            ValueError: for an unknown feature, and for boundary n, which transformers does not return.
        """
        layers, features = self.shape.num_layers, inputs.features
        check_features(features, layers)
        if layers in features:
            raise ValueError(
                f"feature {layers} (before the final norm) is not returned by transformers; "
                f'take {layers - 1} or "final" (after the norm)'
            )
        placement = place(inputs.cache, inputs.rows, inputs.tokens.shape[1])
        if self._clamped:
            # Nodes beyond the context are never accepted, but would change the frequencies of all others.
            inputs = replace(inputs, positions=inputs.positions.clamp(max=self.shape.max_positions - 1))
        boundaries = sorted({f for f in features if isinstance(f, int)})
        out = self._run(inputs, placement, self._masks(inputs, placement), boundaries)
        final = out.last_hidden_state.to(self.device)
        if boundaries and (out.hidden_states is None or out.hidden_states[boundaries[0]].shape != final.shape):
            raise ValueError(
                f"{type(self.model).__name__} has no single residual stream to take features {boundaries} from; "
                'allowed: "final"'
            )
        taken = [final if f == "final" else out.hidden_states[f].to(self.device) for f in features]
        picked = torch.cat(taken, dim=-1) if taken else None
        if inputs.logits_at is not None and inputs.logits_at.shape[1] == 0:
            accurate = torch.promote_types(final.dtype, torch.float32)
            return TargetOutput(final.new_empty(len(inputs.rows), 0, self.shape.vocab_size, dtype=accurate), picked)
        return TargetOutput(self.project(gather_positions(final, inputs.logits_at)), picked)

    def _run(self, inputs: TargetInput, placement: Placement, masks: Any, boundaries: Sequence[int] = ()) -> Any:
        """Runs the model without its head; with `masks` None, transformers builds the mask."""
        from aquiline.targets.hf_cache import bridge

        return self._base(
            inputs.tokens,
            attention_mask=masks,
            position_ids=inputs.positions,
            use_cache=True,
            return_dict=True,
            **{self._cache_name: bridge(inputs.cache, placement, self._slots, self.shape.num_layers)},
            **({"output_hidden_states": list(boundaries)} if boundaries else {}),
        )

    def _masks(self, inputs: TargetInput, placement: Placement) -> Any:
        """Returns one additive (B, 1, T, span) mask, or one per kind of layer."""
        masks: dict[str, Any] = {}
        for kind, window in self.windows.items():
            mask = attention_mask(placement, inputs.positions, inputs.ancestors, window, self._cache_dtype)
            masks[kind] = None if mask is None else mask[:, None]
        return masks.get("", masks)

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.model.get_input_embeddings()(tokens)
        return result.to(self.device)

    def project(self, hidden: Tensor) -> Tensor:
        logits = self._rule(self._head(hidden)).to(self.device)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _device(model: Any) -> torch.device:
    device = model.get_input_embeddings().weight.device
    if device.type != "meta":
        return torch.device(device)
    placed = {torch.device(d) for d in getattr(model, "hf_device_map", {}).values() if d not in ("cpu", "disk")}
    return min(placed, key=str) if placed else torch.device("cpu")


def target_from_hf(model: nn.Module) -> Target:
    """Wraps a transformers model as a target, in our own decoder if that computes the same.

    The decoder shares the model's parameters; nothing is copied, and the model is not modified.

    Args:
        model: a causal LM in eval mode, or a PEFT wrapper of one.

    Raises:
        TypeError, ValueError: as `HFTarget`.
    """
    return shared_decoder(model) or HFTarget(model)
