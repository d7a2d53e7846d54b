"""Draft-head checkpoints as others write them, built from the published key tables.

Nothing here calls our own writers: names, shapes and configuration keys are spelled out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from aquiline.checkpoints.eagle.stored import head_from_stored
from aquiline.checkpoints.open import open_head, stored_eagle
from aquiline.checkpoints.report import HeadReport
from aquiline.drafters.eagle_network import DraftHead
from aquiline.targets.target import TargetShape

H, INNER, HEADS, KV, DIM, V, VD, LAYERS = 16, 24, 4, 2, 4, 40, 12, 10
TARGET = TargetShape(vocab_size=V, hidden_size=H, num_layers=LAYERS, max_positions=128)
DEFAULT_FEATURES = (2, 5, 7)
IDS = torch.tensor([1, 2, 3, 7, 8, 12, 17, 20, 21, 29, 33, 39])
"""Target ids of the draft vocabulary."""


def weights(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random tensors, different for each name."""
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def layer_shapes(prefix: str, attention_input: int, *, hidden: int = H) -> dict[str, tuple[int, ...]]:
    """A decoder layer without its first norm."""
    return {
        f"{prefix}.self_attn.q_proj.weight": (HEADS * DIM, attention_input),
        f"{prefix}.self_attn.k_proj.weight": (KV * DIM, attention_input),
        f"{prefix}.self_attn.v_proj.weight": (KV * DIM, attention_input),
        f"{prefix}.self_attn.o_proj.weight": (hidden, HEADS * DIM),
        f"{prefix}.mlp.gate_proj.weight": (INNER, hidden),
        f"{prefix}.mlp.up_proj.weight": (INNER, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, INNER),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }


def eagle1(
    prefix: str = "layers.0", fc: str = "fc", *, bias: bool = False, embedding: bool = True
) -> dict[str, Tensor]:
    """EAGLE-1/2 (eagle.md §2.1)."""
    shapes: dict[str, tuple[int, ...]] = {f"{fc}.weight": (H, 2 * H), **layer_shapes(prefix, H)}
    if bias:
        shapes[f"{fc}.bias"] = (H,)
    if embedding:
        shapes["embed_tokens.weight"] = (V, H)
    return weights(shapes)


def eagle3(first: str = "midlayer", *, features: int = 3, target_hidden: int = H, vd: int = VD) -> dict[str, Tensor]:
    """EAGLE-3 (eagle.md §2.2, ecosystem.md §1)."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, features * target_hidden),
        **layer_shapes(first, 2 * H),
        f"{first}.input_layernorm.weight": (H,),
        f"{first}.hidden_norm.weight": (H,),
        "norm.weight": (H,),
        "lm_head.weight": (vd, H),
    }
    tensors = weights(shapes)
    if vd != V:
        tensors["d2t"] = IDS - torch.arange(VD)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool)
        tensors["t2d"][IDS] = True
    return tensors


def llama_config(**changes: Any) -> dict[str, Any]:
    """The keys that a head's config.json shares with its target's (eagle.md §2.1)."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": H,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": V,
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not ...}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, pickled: bool = False) -> Path:
    """Writes config.json and the weights in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def shard(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Writes the weights in two files under an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name].contiguous() for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def speculators_config(**changes: Any) -> dict[str, Any]:
    """speculators 0.9 (ecosystem.md §1)."""
    inner = llama_config(rope_parameters={"rope_theta": 5000.0, "rope_type": "default"})
    config: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": VD,
        "norm_before_residual": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "transformer_layer_config": inner,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not ...}


def modelopt_config(**changes: Any) -> dict[str, Any]:
    """NVIDIA ModelOpt (ecosystem.md §4)."""
    inner = {
        "eagle_aux_hidden_state_layer_ids": [1, LAYERS // 2 - 1, LAYERS - 4],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
    }
    inner.update(changes)
    return llama_config(
        architectures=["LlamaForCausalLMEagle3"], rope_theta=5000.0, draft_vocab_size=VD, eagle_config=inner
    )


def opened(path: Path, target: TargetShape) -> tuple[DraftHead, HeadReport]:
    """An EAGLE head's network in float32, and how its files were understood."""
    head = open_head(path, target)
    return head_from_stored(stored_eagle(head), torch.float32), head.report


def eagle3_head(folder: Path, **changes: Any) -> Path:
    """An EAGLE-3 head in bfloat16 with float32 norms."""
    tensors = {n: t.to(torch.bfloat16) if t.dim() == 2 else t for n, t in eagle3().items()}
    settings = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VD, "rope_theta": 5000.0} | changes
    extra = settings.pop("tensors", {})
    return write(folder, llama_config(**settings), tensors | extra)


def assert_same_bits(first: Path, second: Path) -> None:
    left, right = (stored_eagle(open_head(folder, TARGET)) for folder in (first, second))
    assert left.tensors.keys() == right.tensors.keys()
    for name, tensor in left.tensors.items():
        assert tensor.dtype == right.tensors[name].dtype, name
        assert torch.equal(tensor, right.tensors[name]), name
    assert left.config == right.config and (left.gamma, left.window) == (right.gamma, right.window)
    assert (left.draft_to_target is None) == (right.draft_to_target is None)
    if left.draft_to_target is not None:
        assert torch.equal(left.draft_to_target, right.draft_to_target)
    assert (left.embedding is None) == (right.embedding is None)
