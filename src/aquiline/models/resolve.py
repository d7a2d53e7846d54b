"""Resolves a target's name to a folder with its weights, and fingerprints targets."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from aquiline.models.cache_folder import build_once, cache_root
from aquiline.models.embedded import EMBEDDED, fetch_embedded
from aquiline.models.files import inside, read_json, user_path, write_text
from aquiline.models.gguf import LAYOUT, write_target_from_gguf
from aquiline.models.hub import fetch, is_hub_id
from aquiline.models.tensors import is_there, read_weight_map

logger = logging.getLogger("aquiline")

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_WHOLE_NAME, _INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
# Parts of the fingerprint: keys of the config, and pieces of a tensor with their bytes.
_CONFIG_ESSENTIALS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_SAMPLES, _SAMPLE_BYTES = 8, 64


def resolve_target(name: str | Path) -> Path:
    """Returns the folder of a target, fetching or converting it if necessary; logs each slow part.

    Tried in this order: an alias of an embedded model (``smollm2``, ``gemma3-270m``), a folder or
    a GGUF file that exists, a hub id (``organisation/name``). ``./smollm2`` is a folder that is named
    like an alias. A hub model that is complete in the local hub cache is taken from there without
    asking the network.

    Returns:
        A folder with ``config.json`` and safetensors weights.

    Raises:
        ValueError: for an unknown name, a folder that is not a target, a corrupt file, or an unsupported
            GGUF architecture.
        RuntimeError: if the download fails.
    """
    text = str(name)
    if isinstance(name, str) and name in EMBEDDED:
        return fetch_embedded(name)
    path = user_path(name)
    if path.is_dir():
        check_target_folder(path)
        return path
    if path.is_file():
        return _from_file(path)
    if is_hub_id(text):
        return fetch(text, _HUB_FILES, check_target_folder, f", or take an alias ({', '.join(EMBEDDED)})")
    raise ValueError(
        f"unknown target {text!r}: no file or folder of that name; allowed: an alias "
        f"({', '.join(EMBEDDED)}), a model folder, a GGUF file, or a hub id (organisation/name)"
    )


def check_target_folder(folder: Path) -> None:
    """Checks that a folder holds a config and whole weights; reads only the headers of the weight files.

    Raises:
        ValueError: if something is missing or broken.
    """
    config = _read_config(folder)
    architecture = str((config.get("architectures") or ["?"])[0])
    if "eagle" in architecture.lower():
        raise ValueError(f"{folder} holds a draft head ({architecture}), not a target; give it as the draft")
    for file in weight_files(folder):
        tensor_entries(file)


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a model folder, in the order of their names.

    As in transformers, model.safetensors takes precedence over an index.

    Raises:
        ValueError: if there are none, a shard of the index is missing, or a link leaves the folder.
    """
    names = [_WHOLE_NAME]
    if not is_there(folder, _WHOLE_NAME) and is_there(folder, _INDEX_NAME):
        names = sorted(set(read_weight_map(folder, _INDEX_NAME).values()))
    missing = [name for name in names if not is_there(folder, name)]
    if names and not missing:
        return [inside(folder, name) for name in names]
    if any(folder.glob("*.bin")):
        raise ValueError(
            f"{folder} has its weights as pickled .bin files only; convert them once with "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise ValueError(
        f"{folder} lacks {', '.join(missing) or 'weights'}; a target folder has config.json and "
        "model.safetensors (or an index and all its shards): fetch it again"
    )


def target_fingerprint(folder: Path) -> str:
    """Returns a hash, 64 hexadecimal digits, that differs between targets that a draft head cannot share.

    It covers the sizes in the config, a fixed sample of every weight tensor (so that a fine-tuned
    model differs from its stock model), and the vocabulary. Saving the same model again with
    transformers does not change it; another dtype or vocabulary does. It reads about 500 bytes a
    tensor, and the tokenizer file.

    Raises:
        ValueError: as `check_target_folder`.
    """
    config = _read_config(folder)
    digest = hashlib.sha256()
    digest.update(_canonical({key: config.get(key) for key in _CONFIG_ESSENTIALS}))
    tied = config.get("tie_word_embeddings") is True
    entries = [entry for file in weight_files(folder) for entry in tensor_entries(file)]
    samples = {name: _sample(file, offset, facts["data_offsets"]) for name, file, offset, facts in entries}
    for name, _, _, facts in sorted(entries, key=lambda entry: entry[0]):
        # A tied head may or may not have been saved beside the embedding; one that differs is the head.
        if tied and name == "lm_head.weight" and samples[name] == samples.get("model.embed_tokens.weight"):
            continue
        digest.update(_canonical([name, facts["dtype"], facts["shape"]]))
        digest.update(samples[name])
    digest.update(_vocabulary_hash(folder))
    return digest.hexdigest()


def _from_file(path: Path) -> Path:
    if path.suffix != ".gguf":
        raise ValueError(f"{path} is not a target; of single files only .gguf is read: give its folder")
    sha256 = _file_hash(path)

    def build(folder: Path) -> None:
        logger.info("dequantising %s", path.name)
        write_target_from_gguf(path, folder)

    stamp = {"target": "gguf", "gguf_sha256": sha256, "layout": LAYOUT}
    return build_once(cache_root() / "gguf" / sha256[:32], stamp, build)


def _file_hash(path: Path) -> str:
    """Returns the sha256 of a file, remembered by its path, size and time of change."""
    status = path.stat()
    place = str(path.resolve())
    state = [place, status.st_size, status.st_mtime_ns]
    memory = cache_root() / "gguf" / f"{hashlib.sha256(place.encode()).hexdigest()[:32]}.json"
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
        if known["file"] == state:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    logger.info("hashing %s", path.name)
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    sha256 = digest.hexdigest()
    memory.parent.mkdir(parents=True, exist_ok=True)
    write_text(memory, json.dumps({"file": state, "sha256": sha256}))
    return sha256


def _read_config(folder: Path) -> dict[str, Any]:
    if is_there(folder, "config.json"):
        return read_json(inside(folder, "config.json"))
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if ggufs:
        raise ValueError(f"{folder} has no config.json but {ggufs[0]}; give the file {folder / ggufs[0]}")
    raise ValueError(f"{folder} has no config.json; a target folder has config.json and safetensors weights")


def tensor_entries(file: Path) -> list[tuple[str, Path, int, dict[str, Any]]]:
    """Lists ``(name, file, start of the data, header entry)`` of a safetensors file.

    Raises:
        ValueError: if the header is broken, or the file is shorter or longer than it says.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > size - 8:
                raise ValueError("the header is longer than the file")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = max((facts["data_offsets"][1] for facts in header.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(f"{size} bytes, but the header says {8 + length + end}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is not a whole safetensors file ({error}); fetch it again") from error
    return [(name, file, 8 + length, facts) for name, facts in header.items()]


def _sample(file: Path, start: int, data_offsets: tuple[int, int]) -> bytes:
    """Returns a few short pieces of a tensor's bytes, evenly spread from its start to its end."""
    first, last = data_offsets
    room = max(last - first - _SAMPLE_BYTES, 0)
    pieces = []
    with file.open("rb") as stream:
        for piece in range(_SAMPLES):
            stream.seek(start + first + room * piece // (_SAMPLES - 1))
            pieces.append(stream.read(min(_SAMPLE_BYTES, last - first)))
    return b"".join(pieces)


def _vocabulary_hash(folder: Path) -> bytes:
    file = folder / "tokenizer.json"
    if file.is_file():
        document = read_json(file)
        vocabulary = document.get("model", {}).get("vocab")
        added = [[token.get("id"), token.get("content")] for token in document.get("added_tokens", [])]
        return hashlib.sha256(_canonical([vocabulary, added])).digest()
    # Tokenizers without that file keep the vocabulary in one of these.
    digest = hashlib.sha256()
    for name in ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    return digest.digest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
