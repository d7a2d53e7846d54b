"""Dequantises GGUF files to ordinary bfloat16 model folders.

GGUF holds a model's weights in block-quantised form, with its tokenizer and chat template in the
header. This module writes them as ``config.json``, ``model.safetensors``, ``tokenizer.json``,
``tokenizer_config.json`` and ``generation_config.json``, so that all later code sees one kind of
target. transformers also has a GGUF loader, but it may keep the weights packed, cannot save what it
loaded, and ignores rope factors and text splitters in the file.

A dequantised weight is ``scale * q + minimum`` in float32, with more bits than bfloat16 (in SmolLM2's
Q4_1 file, 82 % of the weights are not representable). The weights rounded to the nearest bfloat16
*define* the target; drafts, heads and tests all refer to them.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aquiline.models.gguf_header import GgufHeader, config_from_gguf, read_gguf_header
from aquiline.models.gguf_tokenizer import special_tokens, tokenizer_from_gguf

if TYPE_CHECKING:
    import torch

# Increase this when the output changes, so that caches of older versions are rebuilt.
LAYOUT = 1
SHARD_BYTES = 4 << 30

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_EXTRA_LAYER_NAMES: dict[str, dict[str, str]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": _HEAD_NORMS,
    "gemma3": {
        **_HEAD_NORMS,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
# Part of the rope settings, not a weight.
_NOT_WEIGHTS = {"rope_freqs.weight"}


def write_target_from_gguf(path: Path, folder: Path) -> None:
    """Dequantises a GGUF file into ``folder``, weights rounded to bfloat16.

    Args:
        folder: an existing, empty folder.

    Raises:
        ValueError: for a file that is not GGUF or is truncated, an unsupported architecture, and a missing or
            unexpected tensor.
    """
    header = read_gguf_header(path)
    names = tensor_names(header)
    config = config_from_gguf(header)
    _write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", ids)
    _write_weights(header, names, folder)
    _write_tokenizer(header, folder)


def tensor_names(header: GgufHeader) -> dict[str, str]:
    """Maps each GGUF tensor name to its Hugging Face name.

    Raises:
        ValueError: if a tensor of the architecture is missing, or another is there (mixtures of experts,
            adapters).
    """
    layer_names = {**_LAYER_NAMES, **_EXTRA_LAYER_NAMES[header.architecture]}
    count = int(header.number("block_count"))
    if not 0 < count <= len(header.tensors):
        raise ValueError(
            f"{header.path} says block_count {count}, and holds {len(header.tensors)} tensors; fetch it again"
        )
    required = ["token_embd.weight", "output_norm.weight"]
    required += [f"blk.{layer}.{name}.weight" for layer in range(count) for name in layer_names]
    missing = [name for name in required if name not in header.tensors]
    if missing:
        raise ValueError(
            f"{header.path} lacks the tensor {missing[0]} ({len(missing)} in total); it is incomplete or one part of "
            "a split file: fetch the whole model as one file"
        )
    found = {name: _hf_name(name, layer_names) for name in header.tensors}
    unknown = [name for name, hf in found.items() if hf is None and name not in _NOT_WEIGHTS]
    if unknown:
        raise ValueError(
            f"{header.path} has the tensor {unknown[0]}, which a plain {header.architecture} model "
            "does not have; use the model's safetensors folder instead"
        )
    return {name: hf for name, hf in found.items() if hf is not None}


def dequantise(header: GgufHeader, name: str) -> "torch.Tensor":
    """Returns the tensor of this GGUF name in Hugging Face's layout: bfloat16, shape outermost first."""
    import torch
    from gguf.quants import dequantize

    stored = header.tensors[name]
    values = dequantize(stored.data, stored.tensor_type).astype(np.float32, copy=False)
    if header.architecture == "llama" and ".attn_q." in name:
        values = rotary_halves(values, header.heads)
    elif header.architecture == "llama" and ".attn_k." in name:
        values = rotary_halves(values, header.kv_heads)
    elif header.architecture == "gemma3" and name.endswith("_norm.weight"):
        # Gemma's norms multiply by 1 + weight; llama.cpp stores the sum.
        values = values - 1.0
    return torch.from_numpy(np.array(values)).to(torch.bfloat16)


def rotary_halves(rows: Any, heads: int) -> Any:
    """Reorders the rows of each head, of an array or a tensor, from llama.cpp's pairs (x₀ y₀ x₁ y₁ …) to halves."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _hf_name(name: str, layer_names: Mapping[str, str]) -> str | None:
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or not layer.isdigit() or part not in layer_names:
        return None
    return f"model.layers.{layer}.{layer_names[part]}.{kind}"


def _write_weights(header: GgufHeader, names: Mapping[str, str], folder: Path) -> None:
    """Writes the tensors in shards, so that memory holds only one."""
    from safetensors.torch import save_file

    shards = list(_shards(header, names))
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        if len(shards) == 1:
            file = "model.safetensors"
        tensors = {names[name]: dequantise(header, name) for name in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))
    if len(shards) > 1:
        total = sum(_bfloat16_bytes(header, name) for name in names)
        document = {"metadata": {"total_size": total}, "weight_map": index}
        _write_json(folder / "model.safetensors.index.json", document)


def _shards(header: GgufHeader, names: Mapping[str, str]) -> Iterator[list[str]]:
    shard: list[str] = []
    size = 0
    for name in sorted(names, key=names.__getitem__):
        added = _bfloat16_bytes(header, name)
        if shard and size + added > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += added
    yield shard


def _bfloat16_bytes(header: GgufHeader, name: str) -> int:
    return 2 * int(header.tensors[name].n_elements)


def _write_tokenizer(header: GgufHeader, folder: Path) -> None:
    special = special_tokens(header)
    tokenizer_from_gguf(header, special).save(str(folder / "tokenizer.json"))
    # Written by hand: transformers 4 and 5 and serving engines all accept this class name, and none
    # of them rebuilds the splitter from the model's type.
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    settings["clean_up_tokenization_spaces"] = False
    settings["model_max_length"] = int(header.number("context_length"))
    template = header.scalars.get("tokenizer.chat_template")
    if template is not None:
        settings["chat_template"] = template
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
