"""Reads and writes EAGLE-3 heads as GGUF files for llama.cpp (architecture `eagle3`).

Differs from the safetensors layouts: `d2t` holds absolute target ids, query and key rows are
interleaved for llama.cpp's rotary, norms are float32, the tokenizer lies in the file (it is the
target's, copied from the target's own GGUF file), and `t2d` is left out.

Source: llama.cpp, conversion/llama.py and src/models/eagle3.cpp (in llama-cpp-python 0.3.36).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aquiline.checkpoints.eagle.config_kinds import check_kinds, check_sizes
from aquiline.checkpoints.eagle.dialects import Translated
from aquiline.checkpoints.eagle.stored import StoredHead
from aquiline.checkpoints.eagle.vocabulary import offsets
from aquiline.models.files import replacing
from aquiline.models.gguf import rotary_halves
from aquiline.models.gguf_header import open_gguf
from aquiline.targets.rope import RopeConfig, inverse_frequencies

ARCHITECTURE = "eagle3"
_ROPE_KEY = "aquiline.rope_parameters"
_FINGERPRINT_KEY, _GAMMA_KEY, _WINDOW_KEY = "aquiline.target_fingerprint", "aquiline.gamma", "aquiline.window"
_NAMES = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "midlayer.input_layernorm.weight": "blk.0.attn_norm.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "midlayer.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "midlayer.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "midlayer.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "midlayer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "midlayer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "midlayer.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "midlayer.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "midlayer.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
}
_FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}


def write_gguf_head(path: Path, stored: StoredHead, target_gguf: Path) -> None:
    """Writes a head, whole or not at all.

    Args:
        stored: an EAGLE-3 head that llama.cpp can run (see `export`).
        target_gguf: the target's own GGUF file, whose tokenizer is copied.

    Raises:
        ValueError: if `target_gguf` is not a GGUF file with a tokenizer of the target's size.
    """
    from gguf import GGUFWriter

    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as scratch:
        writer = GGUFWriter(scratch, ARCHITECTURE)
        _fill(writer, stored, target_gguf)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _fill(writer: Any, stored: StoredHead, target_gguf: Path) -> None:
    _write_sizes(writer, stored)
    _copy_tokenizer(writer, target_gguf, stored.config.vocab_size)
    tensors = dict(stored.tensors)
    if stored.embedding is not None:
        tensors["embed_tokens.weight"] = stored.embedding
    layer = stored.config.layer
    for name, tensor in tensors.items():
        heads = {"q_proj.weight": layer.num_heads, "k_proj.weight": layer.num_kv_heads}.get(
            ".".join(name.split(".")[-2:])
        )
        _add(writer, _NAMES[name], interleaved(tensor, heads) if heads else tensor)
    if stored.draft_to_target is not None:
        writer.add_tensor("d2t", stored.draft_to_target.to(torch.int64).numpy())
    if layer.rope.kind == "llama3":
        _add(writer, "rope_freqs.weight", _rope_factors(layer.rope))


def is_gguf_head(path: Path) -> bool:
    """Returns True for a GGUF file with a draft head."""
    try:
        return open_gguf(path)[1].get("general.architecture") == ARCHITECTURE
    except ValueError:
        return False


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Reorders the rows of each head from halves (x₀…, y₀…) to pairs (x₀ y₀ x₁ y₁ …)."""
    rows = weight.shape[0] // heads
    return weight.reshape(heads, 2, rows // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape).contiguous()


def read_gguf_head(path: Path) -> Translated:
    """Reads a head from a GGUF file.

    Raises:
        ValueError: if it is not whole, of another architecture, or quantised.
    """
    reader, fields = open_gguf(path)
    raw = {tensor.name: _tensor(tensor, path) for tensor in reader.tensors}
    architecture = fields.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ValueError(
            f"{path} has the architecture {architecture!r}, expected {ARCHITECTURE!r}: it is not a draft head"
        )
    config = _config(fields, raw, path)
    check_kinds(config, str(path))
    check_sizes(config, str(path))
    back = {stored: name for name, stored in _NAMES.items()}
    tensors: dict[str, Tensor] = {}
    for name, tensor in raw.items():
        if name == "d2t":
            tensors["d2t"] = offsets(tensor)
        elif name != "rope_freqs.weight":
            if name not in back:
                raise ValueError(f"{path}: {name} is unexpected in a draft head; it belongs to another model")
            tensors[back[name]] = tensor
    for part, heads in (("q_proj", config["num_attention_heads"]), ("k_proj", config["num_key_value_heads"])):
        name = f"midlayer.self_attn.{part}.weight"
        if name in tensors:
            tensors[name] = rotary_halves(tensors[name], heads)
    return Translated("gguf", "eagle3", config, tensors, ())


def _write_sizes(writer: Any, stored: StoredHead) -> None:
    config, layer = stored.config, stored.config.layer
    arch = ARCHITECTURE
    writer.add_name("EAGLE-3 draft head")
    writer.add_file_type(_FILE_TYPES.get(stored.dtype, 0))
    for key, value in (
        ("context_length", config.max_positions),
        ("embedding_length", layer.hidden_size),
        ("block_count", 1),
        ("feed_forward_length", layer.intermediate_size),
        ("attention.head_count", layer.num_heads),
        ("attention.head_count_kv", layer.num_kv_heads),
        ("attention.key_length", layer.head_dim),
        ("attention.value_length", layer.head_dim),
        ("rope.dimension_count", layer.rope.dim),
        ("vocab_size", config.vocab_size),
        ("target_hidden_size", config.target_hidden_size),
    ):
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", layer.rms_norm_eps)
    writer.add_float32(f"{arch}.rope.freq_base", layer.rope.theta)
    if layer.rope.kind == "linear":
        writer.add_string(f"{arch}.rope.scaling.type", "linear")
        writer.add_float32(f"{arch}.rope.scaling.factor", float((layer.rope.scaling or {})["factor"]))
    writer.add_array(f"{arch}.target_layers", [int(f) for f in config.features])
    writer.add_bool(f"{arch}.norm_before_residual", config.norm_before_residual)
    writer.add_bool(f"{arch}.norm_before_fc", config.norm_before_fc)
    # float32 metadata cannot hold every epsilon and base; these give back what went in.
    exact = {**dict(layer.rope.scaling or {}), "rope_type": layer.rope.kind, "rope_theta": layer.rope.theta}
    writer.add_string(_ROPE_KEY, json.dumps({"rope": exact, "rms_norm_eps": layer.rms_norm_eps}))
    if stored.fingerprint:
        writer.add_string(_FINGERPRINT_KEY, stored.fingerprint)
    if stored.gamma is not None:
        writer.add_float64(_GAMMA_KEY, stored.gamma)
    if stored.window is not None:
        writer.add_uint32(_WINDOW_KEY, stored.window)


def _copy_tokenizer(writer: Any, target_gguf: Path, vocab_size: int) -> None:
    from gguf import GGUFValueType

    reader, _ = open_gguf(target_gguf, "give the target's own GGUF file")
    fields = {key: field for key, field in reader.fields.items() if key.startswith("tokenizer.")}
    if "tokenizer.ggml.tokens" not in fields:
        raise ValueError(f"{target_gguf} has no tokenizer; give the target's own GGUF file")
    count = len(fields["tokenizer.ggml.tokens"].data)
    if count != vocab_size:
        raise ValueError(
            f"{target_gguf} has a tokenizer of {count} tokens, the head's target has {vocab_size}; give the target's "
            "own GGUF file"
        )
    for key, field in fields.items():
        if field.types[0] == GGUFValueType.ARRAY:
            writer.add_key_value(key, field.contents(), GGUFValueType.ARRAY, sub_type=field.types[-1])
        else:
            writer.add_key_value(key, field.contents(), field.types[0])


def _add(writer: Any, name: str, tensor: Tensor) -> None:
    from gguf import GGMLQuantizationType

    if tensor.dim() == 1 or tensor.dtype == torch.float64:
        tensor = tensor.float()
    if tensor.dtype == torch.bfloat16:
        writer.add_tensor(name, tensor.view(torch.int16).numpy(), raw_dtype=GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, tensor.numpy())


def _rope_factors(rope: RopeConfig) -> Tensor:
    """Returns llama.cpp's divisors of the plain frequencies, (dim / 2,) float32."""
    plain = inverse_frequencies(RopeConfig(rope.theta, rope.dim))[0]
    return plain / inverse_frequencies(rope)[0]


def _tensor(tensor: Any, path: Path) -> Tensor:
    shape = tuple(int(n) for n in reversed(tensor.shape))
    kind = tensor.tensor_type.name
    if kind == "BF16":
        return torch.from_numpy(np.array(tensor.data).view(np.int16)).view(torch.bfloat16).reshape(shape)
    if kind not in ("F64", "F32", "F16", "I64"):
        raise ValueError(f"{path}: {tensor.name} is quantised ({kind}); only F32, F16 and BF16 heads are read")
    return torch.from_numpy(np.array(tensor.data)).reshape(shape)


def _config(fields: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> dict[str, Any]:
    def need(key: str) -> Any:
        if f"{ARCHITECTURE}.{key}" not in fields:
            raise ValueError(f"{path} lacks {ARCHITECTURE}.{key}; it is not a whole draft head, convert it again")
        return fields[f"{ARCHITECTURE}.{key}"]

    exact = _exact(fields, "rope_freqs.weight" in tensors, path)
    rope: Any = exact.get("rope", {"rope_theta": fields.get(f"{ARCHITECTURE}.rope.freq_base", 10000.0)})
    if "rope" not in exact and fields.get(f"{ARCHITECTURE}.rope.scaling.type", "none") != "none":
        rope |= {"rope_type": "linear", "factor": need("rope.scaling.factor")}
    heads, hidden = need("attention.head_count"), need("embedding_length")
    output = tensors.get("output.weight")
    config = {
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get(f"{ARCHITECTURE}.attention.head_count_kv", heads),
        "head_dim": fields.get(f"{ARCHITECTURE}.attention.key_length"),
        "num_hidden_layers": need("block_count"),
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": exact.get("rms_norm_eps", need("attention.layer_norm_rms_epsilon")),
        "rope_parameters": rope,
        "vocab_size": need("vocab_size"),
        "draft_vocab_size": None if output is None else output.shape[0],
        "target_hidden_size": need("target_hidden_size"),
        "eagle_aux_hidden_state_layer_ids": list(need("target_layers")),
        "norm_before_residual": fields.get(f"{ARCHITECTURE}.norm_before_residual", False),
        "norm_before_fc": fields.get(f"{ARCHITECTURE}.norm_before_fc", False),
    }
    for name, key in (("target_fingerprint", _FINGERPRINT_KEY), ("gamma", _GAMMA_KEY), ("window", _WINDOW_KEY)):
        if key in fields:
            config[f"aquiline_{name}"] = fields[key]
    return config


def _exact(fields: Mapping[str, Any], scaled: bool, path: Path) -> dict[str, Any]:
    """Reads the settings that float32 metadata cannot hold, as `_write_sizes` wrote them."""
    try:
        exact = json.loads(fields.get(_ROPE_KEY, "{}"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {_ROPE_KEY} is not valid JSON ({error}); export the head again") from error
    if not isinstance(exact, dict):
        raise ValueError(f"{path}: {_ROPE_KEY} is {exact!r}, expected an object; export the head again")
    if scaled and "rope" not in exact:
        raise ValueError(
            f"{path}: rope_freqs.weight is refused: its scaling cannot be recovered; read the head's own folder"
        )
    return exact
