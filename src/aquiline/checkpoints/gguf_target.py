"""GGUF files as targets: dequantised to an ordinary bfloat16 model folder.

GGUF holds a model's weights in block-quantised form, with its tokenizer and chat template in the
header. transformers reads it; this module writes what it read as ``config.json``,
``model.safetensors``, ``tokenizer.json``, ``tokenizer_config.json`` and
``generation_config.json``, so that everything after it sees one kind of target.

A dequantised weight is ``scale * q + minimum`` in float32, with more bits than bfloat16 has (for
the Q4_1 file of SmolLM2, 82 % of the weights are not representable). The weights rounded to the
nearest bfloat16 are the *definition* of the target: drafts, heads and tests are all about those.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
# Raised when what is written changes, so that caches made by an older version are rebuilt.
LAYOUT = 1


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says about itself and transformers does not carry over.

    Attributes:
        architecture: ``general.architecture``, such as ``"llama"``.
        pre_tokenizer: ``tokenizer.ggml.pre``, the name of the text splitter; ``""`` if absent.
        context_length: Longest sequence in tokens; 0 if absent.
        end_ids: Ids that end a turn or a text, the end-of-text id first.
    """

    architecture: str
    pre_tokenizer: str
    context_length: int
    end_ids: tuple[int, ...]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file and refuse what cannot be a target.

    Raises:
        ValueError: Not a GGUF file, truncated, or an architecture outside ``ARCHITECTURES``.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in _scalar_fields(reader)}
    except (ValueError, IndexError, TypeError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not a readable GGUF file ({error}); it may be truncated: fetch it again"
        ) from error
    architecture = str(fields.get("general.architecture", "unknown"))
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{path} has GGUF architecture {architecture!r}; allowed are "
            f"{', '.join(ARCHITECTURES)}: use the model's safetensors folder instead"
        )
    ends = [fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
    return GgufHeader(
        architecture=architecture,
        pre_tokenizer=str(fields.get("tokenizer.ggml.pre", "")),
        context_length=int(fields.get(f"{architecture}.context_length", 0)),
        end_ids=tuple(dict.fromkeys(int(end) for end in ends if end is not None)),
    )


def write_target_from_gguf(path: Path, folder: Path) -> None:
    """Dequantise a GGUF file into ``folder``, weights rounded to bfloat16.

    Args:
        path: The GGUF file.
        folder: An existing, empty folder.

    Raises:
        ValueError: As ``read_gguf_header``.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    header = read_gguf_header(path)
    with _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.bfloat16
        )
        _tidy_config(model, header)
        model.save_pretrained(folder)
    _write_tokenizer(tokenizer, header, folder)


def _scalar_fields(reader: Any) -> Iterator[tuple[str, Any]]:
    from gguf import GGUFValueType

    for name, field in reader.fields.items():
        # Arrays are the vocabulary and the merges: large, slow to decode, and not needed here.
        if field.types and field.types[0] != GGUFValueType.ARRAY:
            yield name, field


def _tidy_config(model: "PreTrainedModel", header: GgufHeader) -> None:
    config = model.config
    # Left by the loader; with it transformers refuses to save, and to load, plain weights.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if hasattr(config, "rms_norm_eps"):
        config.rms_norm_eps = _shortest_float32(config.rms_norm_eps)
    config.name_or_path = ""
    generation = model.generation_config
    if generation is not None and header.end_ids:
        ends = list(header.end_ids)
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]


def _shortest_float32(value: float) -> float:
    """Return the shortest decimal that is the same float32: 9.99999974e-06 becomes 1e-05."""
    import numpy

    return float(str(numpy.float32(value)))


def _write_tokenizer(
    tokenizer: "PreTrainedTokenizerBase", header: GgufHeader, folder: Path
) -> None:
    from tokenizers import Tokenizer, pre_tokenizers

    # ``to_str`` and back is a copy: the tokenizer that came in is not changed.
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    if header.pre_tokenizer == "smollm":
        # The loader keeps only the byte-level splitter; SmolLM2 was trained with each digit
        # apart, which also decides how spaces before a number are merged.
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    backend.save(str(folder / "tokenizer.json"))
    # Written by hand: this class name is read alike by transformers 4 and 5 and by serving
    # engines, and makes none of them rebuild the splitter from the model's type.
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for kind in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = getattr(tokenizer, kind)
        if token is not None:
            settings[kind] = str(token)
    settings["clean_up_tokenization_spaces"] = False
    if header.context_length:
        settings["model_max_length"] = header.context_length
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars inside the block, and put them back after it."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
