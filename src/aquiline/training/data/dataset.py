"""Training sets on disk: written once, then memory-mapped and read by index.

A training set is a folder: ``train.arrow`` and ``validation.arrow`` (Arrow IPC files with the
columns ``input_ids`` list<int32>, ``loss_mask`` list<uint8>, ``id`` string, ``source`` string),
``refused.jsonl`` (one line per unusable record, with the reason) and ``manifest.json`` (sources with
hashes, versions, settings and counts).
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

FORMAT = "aquiline-training-set-1"
SPLITS = ("train", "validation")
_BATCH_ROWS = 256
_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("id", pa.string()),
        ("source", pa.string()),
    ]
)


@dataclass(frozen=True)
class SplitCounts:
    """Size of one split: conversations, tokens, and tokens with loss."""

    conversations: int = 0
    tokens: int = 0
    loss_tokens: int = 0


@dataclass(frozen=True, eq=False)
class TokenisedConversation:
    """One training example.

    `input_ids` (T,) int32; `loss_mask` (T,) bool, True if the *token itself* belongs to the
    assistant (a trainer shifts it with its labels); `id` depends only on the conversation's text;
    `source` is "file:record".
    """

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    id: str
    source: str


class SplitWriter:
    """Appends examples to one Arrow file in record batches. A context manager."""

    def __init__(self, path: Path) -> None:
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, _SCHEMA)
        self._rows: list[TokenisedConversation] = []
        self.counts = SplitCounts()

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._writer.close()
        self._sink.close()

    def add(self, example: TokenisedConversation) -> None:
        """Appends one example."""
        self._rows.append(example)
        self.counts = SplitCounts(
            self.counts.conversations + 1,
            self.counts.tokens + len(example.input_ids),
            self.counts.loss_tokens + int(example.loss_mask.sum()),
        )
        if len(self._rows) >= _BATCH_ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._rows:
            return
        rows, self._rows = self._rows, []
        offsets = np.cumsum([0, *(len(row.input_ids) for row in rows)], dtype=np.int32)
        ids = np.concatenate([row.input_ids for row in rows])
        masks = np.concatenate([row.loss_mask for row in rows]).astype(np.uint8)
        columns = [
            pa.ListArray.from_arrays(offsets, pa.array(ids)),
            pa.ListArray.from_arrays(offsets, pa.array(masks)),
            pa.array([row.id for row in rows]),
            pa.array([row.source for row in rows]),
        ]
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=_SCHEMA))


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """One split of a training set, memory-mapped; indexing it returns conversations.

    `lengths` (n,) int64 holds the number of tokens of each conversation. Examples are copies, which
    stay valid and may be modified.
    """

    path: Path
    split: str
    manifest: Mapping[str, Any]
    lengths: npt.NDArray[np.int64]
    _batches: tuple[pa.RecordBatch, ...]
    _starts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenisedConversation:
        if not -len(self) <= index < len(self):
            raise IndexError(f"conversation {index} of {len(self)} in {self.path} ({self.split})")
        index %= len(self)
        which = bisect_right(self._starts, index) - 1
        batch, row = self._batches[which], index - self._starts[which]
        return TokenisedConversation(
            input_ids=np.array(batch["input_ids"][row].values, dtype=np.int32),
            loss_mask=np.array(batch["loss_mask"][row].values, dtype=np.bool_),
            id=batch["id"][row].as_py(),
            source=batch["source"][row].as_py(),
        )

    def __iter__(self) -> Iterator[TokenisedConversation]:
        return (self[index] for index in range(len(self)))

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the manifest; equal for equal sources, tokenizer and settings."""
        return hashlib.sha256(json.dumps(self.manifest, sort_keys=True).encode()).hexdigest()


def open_training_set(
    path: str | Path,
    *,
    split: Literal["train", "validation"] = "train",
    tokenizer_hash: str | None = None,
) -> TrainingSet:
    """Opens one split of a training set written by `aquiline.training.data.prepare.prepare`.

    Args:
        path: the folder.
        split: "train" or "validation".
        tokenizer_hash: the target tokenizer's hash; a set prepared for another one is rejected.

    Raises:
        ValueError: for a missing or damaged training set, or one for another tokenizer.
    """
    path = Path(path)
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; allowed: {', '.join(SPLITS)}")
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a training set ({error}); make one with `prepare`") from error
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path} has the format {manifest.get('format')!r}; allowed: {FORMAT!r}; prepare it again")
    if tokenizer_hash is not None and manifest["tokenizer_hash"] != tokenizer_hash:
        raise ValueError(
            f"{path} was prepared for another tokenizer (hash {manifest['tokenizer_hash'][:12]}, the target's is "
            f"{tokenizer_hash[:12]}): its ids mean other tokens; prepare the conversations again with this target"
        )
    batches = _map(path / f"{split}.arrow")
    starts = np.cumsum([0, *(batch.num_rows for batch in batches)])[:-1]
    lengths = [batch["input_ids"].value_lengths().to_numpy(zero_copy_only=False) for batch in batches]
    flat = np.concatenate([np.zeros(0, np.int64), *lengths]).astype(np.int64)
    expected = manifest["counts"][split]["conversations"]
    if len(flat) != expected:
        raise ValueError(
            f"{path} is damaged: {split} holds {len(flat)} conversations, the manifest {expected}; prepare it again"
        )
    return TrainingSet(path, split, manifest, flat, batches, tuple(starts.tolist()))


def _map(path: Path) -> tuple[pa.RecordBatch, ...]:
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        return tuple(reader.get_batch(i) for i in range(reader.num_record_batches))
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path} is missing or damaged ({error}); prepare it again") from error
