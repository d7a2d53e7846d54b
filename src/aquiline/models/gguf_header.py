"""Reads a GGUF header, and converts it to a Hugging Face configuration."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
_MODEL_TYPES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
# llama.cpp stores Llama 3's frequency scaling as one factor per frequency. All released models share
# these three constants, so only the factor must be recovered.
_LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Gemma 3's sliding layers always use this base, whatever the base of the full layers.
_GEMMA3_LOCAL_THETA = 10_000.0
_GEMMA3_PATTERN = 6


@dataclass(frozen=True, eq=False)
class GgufHeader:
    """An open GGUF file with decoded scalars; its tensors stay on disk.

    Attributes:
        scalars: entries of the header without the tokenizer's arrays, by their full key.
        tensors: ``gguf.ReaderTensor`` by GGUF name; shapes are innermost first.
        arrays: ``gguf.ReaderField`` of the tokenizer's arrays (vocabulary, merges), not decoded.
    """

    path: Path
    architecture: str
    scalars: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, Any] = field(repr=False)
    arrays: Mapping[str, Any] = field(repr=False)

    def number(self, key: str, default: float | None = None) -> float:
        """Returns the number under ``{architecture}.{key}``.

        Raises:
            ValueError: if it is absent and there is no default.
        """
        value = self.scalars.get(f"{self.architecture}.{key}", default)
        if isinstance(value, int | float):
            return value
        raise ValueError(
            f"{self.path} has no single number {self.architecture}.{key}, so this kind of file is not supported; "
            "use the model's safetensors folder instead"
        )

    def array(self, key: str) -> list[Any]:
        """Returns the strings or numbers of the array under ``key``; empty if it is absent."""
        return list(self.arrays[key].contents()) if key in self.arrays else []

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return int(self.number("attention.head_count"))

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return int(self.number("attention.head_count_kv", self.heads))

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a text or a turn, the end-of-text id first."""
        ends = [self.scalars.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
        return tuple(dict.fromkeys(int(end) for end in ends if end is not None))


def read_gguf_header(path: Path) -> GgufHeader:
    """Opens a GGUF file that can be a target.

    Raises:
        ValueError: for a file that is not GGUF or is truncated, or an architecture outside
            `ARCHITECTURES`.
    """
    reader, scalars = open_gguf(path)
    architecture = str(scalars.get("general.architecture", "unknown"))
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{path} has GGUF architecture {architecture!r}; allowed: "
            f"{', '.join(ARCHITECTURES)}; use the model's safetensors folder instead"
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    arrays = {name: entry for name, entry in reader.fields.items() if name not in scalars}
    return GgufHeader(path, architecture, scalars, tensors, arrays)


def open_gguf(path: Path, remedy: str = "it may be truncated: fetch it again") -> tuple[Any, dict[str, Any]]:
    """Opens a GGUF file that may be broken or hostile.

    Args:
        remedy: advice about a broken file, for the message.

    Returns:
        The ``gguf.GGUFReader``, and the decoded header without the tokenizer's arrays, which are large.

    Raises:
        ValueError: for a file that is not GGUF, is truncated, or claims more than it holds.
    """
    from gguf import GGUFReader, GGUFValueType

    try:
        _check_counts(path)
        reader = GGUFReader(path)
        fields = {
            name: entry.contents()
            for name, entry in reader.fields.items()
            if entry.types and not (entry.types[0] == GGUFValueType.ARRAY and name.startswith("tokenizer."))
        }
    except (OSError, ValueError, IndexError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a readable GGUF file ({error}); {remedy}") from error
    return reader, fields


_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


def _check_counts(path: Path) -> None:
    """Raises ValueError if a GGUF header claims more than its file holds.

    The gguf package believes the counts: an array that claims 2³⁴ elements would fill the memory.
    """
    with path.open("rb") as stream:
        walk = _Walk(stream, path.stat().st_size)
        if stream.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        walk.number(4)
        tensors, entries = walk.number(8), walk.number(8)
        if tensors * 24 + entries * 13 > walk.size:
            raise ValueError(f"it claims {tensors} tensors and {entries} entries in {walk.size} bytes")
        for _ in range(entries):
            length = walk.number(8)
            name = stream.read(min(length, 200)).decode(errors="replace")
            walk.skip(max(length - 200, 0), 1, "a name")
            walk.value(walk.number(4), name)


@dataclass(frozen=True)
class _Walk:
    """A walk over a GGUF header; each method raises ValueError where the file ends too early."""

    stream: BinaryIO
    size: int

    def number(self, width: int) -> int:
        data = self.stream.read(width)
        if len(data) < width:
            raise ValueError("it ends inside its header")
        return int.from_bytes(data, "little")

    def skip(self, count: int, width: int, what: str) -> None:
        left = self.size - self.stream.tell()
        if count * width > left:
            raise ValueError(f"{what} claims {count} elements, and {left} bytes are left")
        self.stream.seek(count * width, 1)

    def value(self, kind: int, name: str, depth: int = 0) -> None:
        if kind in _WIDTHS:
            self.skip(1, _WIDTHS[kind], name)
        elif kind == _STRING:
            self.skip(self.number(8), 1, name)
        elif kind == _ARRAY and depth < 4:
            inner, count = self.number(4), self.number(8)
            if inner in _WIDTHS:
                self.skip(count, _WIDTHS[inner], name)
                return
            place = self.stream.tell()
            self.skip(count, 8, name)  # a text or an array takes at least as much
            self.stream.seek(place)
            for _ in range(count):
                self.value(inner, name, depth + 1)
        else:
            raise ValueError(f"{name} has a value of kind {kind}")


def config_from_gguf(header: GgufHeader) -> dict[str, Any]:
    """Returns the ``config.json`` of the model in a GGUF file.

    Contains both ``rope_theta`` and ``rope_parameters``: readers before transformers 5 know only the
    former.

    Raises:
        ValueError: if a size is missing, or a rope variant is not supported.
    """
    model_type, class_name = _MODEL_TYPES[header.architecture]
    hidden = int(header.number("embedding_length"))
    head_dim = int(header.number("attention.key_length", _rope_width(header, hidden)))
    if _rope_width(header, head_dim * header.heads) != head_dim:
        raise ValueError(
            f"{header.path} rotates only part of each head, which is not supported; use the model's safetensors folder"
        )
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "dtype": "bfloat16",
        "vocab_size": int(header.tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": int(header.number("feed_forward_length")),
        "num_hidden_layers": int(header.number("block_count")),
        "num_attention_heads": header.heads,
        "num_key_value_heads": header.kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": int(header.number("context_length")),
        "rms_norm_eps": shortest_float32(header.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest_float32(header.number("rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        **_special_ids(header),
    }
    rope = _rope_parameters(header, config)
    if header.architecture == "gemma3":
        return {**config, **_gemma3_config(header, config, rope)}
    return {**config, "hidden_act": "silu", "rope_parameters": rope}


def shortest_float32(value: float) -> float:
    """Returns the shortest decimal that rounds to the same float32.

    >>> shortest_float32(9.999999747378752e-06)
    1e-05
    """
    return float(str(np.float32(value)))


def _rope_width(header: GgufHeader, total: int) -> int:
    return int(header.number("rope.dimension_count", total // header.heads))


def _special_ids(header: GgufHeader) -> dict[str, Any]:
    ids = {"bos": "bos_token_id", "padding": "pad_token_id"}
    found = {name: header.scalars.get(f"tokenizer.ggml.{kind}_token_id") for kind, name in ids.items()}
    ends = list(header.end_ids)
    found["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
    return found


def _rope_parameters(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    kind = header.scalars.get(f"{header.architecture}.rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"{header.path} has rope scaling {kind!r}; allowed: linear, yarn")
    if "rope_freqs.weight" in header.tensors:
        parameters.update(_llama3_scaling(header, config))
    elif kind != "none":
        parameters["rope_type"] = kind
        parameters["factor"] = shortest_float32(header.number("rope.scaling.factor"))
        if kind == "yarn":
            original = header.number("rope.scaling.original_context_length")
            parameters["original_max_position_embeddings"] = int(original)
    return parameters


def _llama3_scaling(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    stored = np.asarray(header.tensors["rope_freqs.weight"].data, dtype=np.float64)
    width = config["head_dim"]
    wavelength = 2 * math.pi * config["rope_theta"] ** (np.arange(0, width, 2) / width)
    low, high = _LLAMA3_SCALING["low_freq_factor"], _LLAMA3_SCALING["high_freq_factor"]
    turns = _LLAMA3_SCALING["original_max_position_embeddings"] / wavelength
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    factor = float(stored.max())
    expected = 1 / ((1 - blend) / factor + blend)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise ValueError(
            f"{header.path} has rope frequency factors that are not Llama 3's; use the model's "
            "safetensors folder instead"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_SCALING}


def _gemma3_config(header: GgufHeader, config: Mapping[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    kinds = ["sliding_attention" if (layer + 1) % _GEMMA3_PATTERN else "full_attention" for layer in range(layers)]
    # Queries are scaled by the head width, except in the 27B model (62 layers), by hidden / heads.
    width = config["hidden_size"] // header.heads if layers == 62 else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width,
        "sliding_window": int(header.number("attention.sliding_window")),
        "layer_types": kinds,
        "rope_local_base_freq": _GEMMA3_LOCAL_THETA,
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": _GEMMA3_LOCAL_THETA},
        },
    }
