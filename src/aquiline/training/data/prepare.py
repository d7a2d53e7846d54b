"""`prepare`: turns conversations into a training set with the target's own template and tokenizer.

Records are streamed: read, render with the chat template, find the assistant's characters, tokenise
in batches, map the characters to tokens, split, write. Memory holds one batch. The output folder
appears complete or not at all. `aquiline.training.data.dataset` reads it.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from aquiline.models.files import locked
from aquiline.training.data.conversations import Conversation, Message, Refusal, read_conversations
from aquiline.training.data.dataset import (
    FORMAT,
    SplitCounts,
    SplitWriter,
    TokenisedConversation,
    TrainingSet,
    appearing_whole,
    open_training_set,
)
from aquiline.training.data.identity import conversation_id, in_validation
from aquiline.training.data.masks import ChatRenderer, NotFound, Rendered, assistant_tokens
from aquiline.training.data.tally import PrepareReport, Tally, progress_line
from aquiline.training.data.tokens import (
    CHARACTERS_PER_TOKEN,
    check_ids,
    encode_all,
    known_ids,
    load_tokenizer,
    tokenizer_hash,
)
from aquiline.training.settings import PrepareSettings

__all__ = [
    "PrepareReport",
    "TrainingSet",
    "conversation_id",
    "in_validation",
    "load_tokenizer",
    "open_training_set",
    "prepare",
    "tokenizer_hash",
]

NOT_VERBATIM = "assistant turn not found verbatim"
SPECIAL_TOKEN = "special token in the text"
TOO_LONG = "longer than max_length"
NOTHING_LEFT = "no assistant token within max_length"
TRUNCATED = "truncated to max_length"
BAD_FOR_TOKENIZER = "the tokenizer fails on the text"
CONTEXT_ONLY = "earlier answer without loss: the template prints it other than it was generated"
UNFINISHED = "last answer unfinished: ends without an end of turn"

_BATCH_RECORDS = 256
_BATCH_CHARACTERS = 500_000


@dataclass(frozen=True)
class _Ready:
    """A rendered conversation that is not tokenised yet."""

    conversation: Conversation
    rendered: Rendered

    @property
    def messages(self) -> tuple[Message, ...]:
        """The turns; of a preformatted text, what precedes its first answer and the rest."""
        text, first = self.rendered.text, self.rendered.spans[0][0]
        return self.conversation.messages or (Message("user", text[:first]), Message("assistant", text[first:]))


def prepare(
    sources: Sequence[str | Path] | str | Path,
    target_path: str | Path,
    output: str | Path,
    *,
    max_length: int,
    overlong: Literal["truncate", "drop"] = "truncate",
    validation_fraction: float = 0.02,
    strict: bool = False,
    limit: int | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> PrepareReport:
    """Tokenises conversations with the target's chat template into a training set.

    The loss mask is True exactly on the assistant's tokens, including each turn's end-of-turn token
    (see `aquiline.training.data.masks`). A conversation goes to validation if a hash of its first
    user turn falls below `validation_fraction`, so all answers to a prompt, from any source and run,
    are in the same split.

    Args:
        sources: files or dataset names, see `read_conversations`.
        target_path: folder with the target's tokenizer.
        output: folder to create; appears only when complete.
        max_length: longest conversation in tokens, ≥ 8.
        overlong: "truncate" longer conversations at `max_length`, or "drop" them; both are counted.
        validation_fraction: share of prompts held out, in [0, 1).
        strict: raise an error at the first unusable record instead of counting it.
        limit: stop after this many conversations.
        chat_template: replaces the tokenizer's own template.
        chat_template_kwargs: variables of the template, such as ``{"enable_thinking": False}``; a record's
            ``chat_template_kwargs`` take precedence.
        overwrite: replace an existing `output`.
        progress: show a progress line.

    Returns:
        The counts, which the folder's manifest also holds.

    Raises:
        ValueError: for an invalid setting or source, a tokenizer without character offsets or
            template, an existing output, no usable conversation, or, with `strict`, an unusable
            record.
    """
    started = time.monotonic()
    settings = PrepareSettings(max_length, overlong, validation_fraction, strict, limit)
    names = [sources] if isinstance(sources, str | Path) else list(sources)
    output = Path(output)
    _check_output(output, overwrite)
    tokenizer = load_tokenizer(target_path)
    renderer = ChatRenderer(tokenizer, chat_template, chat_template_kwargs)
    vocabulary = known_ids(Path(target_path))
    with locked(output), appearing_whole(output) as partial:
        _check_output(output, overwrite)  # another run may have made it in the meantime
        manifest = _manifest(names, tokenizer, renderer, settings)
        if chat_template_kwargs:
            manifest["chat_template_kwargs"] = dict(chat_template_kwargs)
        if chat_template_kwargs:
            manifest["chat_template_kwargs"] = dict(chat_template_kwargs)
        manifest["counts"] = _write(names, tokenizer, renderer, settings, vocabulary, partial, progress)
        text = json.dumps(manifest, indent=2, ensure_ascii=False)
        (partial / "manifest.json").write_text(text + "\n", encoding="utf-8")
    return _report(output, manifest["counts"], time.monotonic() - started)


def _check_output(output: Path, overwrite: bool) -> None:
    if output.exists() and not overwrite:
        raise ValueError(f"{output} exists; choose another folder, or allow overwriting it")
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file, and a training set is a folder; choose another output")


def _manifest(
    names: Sequence[str | Path], tokenizer: Any, renderer: ChatRenderer, settings: PrepareSettings
) -> dict[str, Any]:
    """Returns a training set's manifest without its counts."""
    return {
        "format": FORMAT,
        "sources": [_describe(name) for name in names],
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": hashlib.sha256(renderer.template.encode()).hexdigest(),
        "settings": asdict(settings),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("transformers", "tokenizers", "pyarrow")},
        },
    }


def _describe(source: str | Path) -> dict[str, Any]:
    path = Path(source)
    if not path.is_file():  # a dataset, or a pipe that can be read only once
        return {"name": str(source)}
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _write(
    names: Sequence[str | Path],
    tokenizer: Any,
    renderer: ChatRenderer,
    settings: PrepareSettings,
    vocabulary: int | None,
    partial: Path,
    progress: bool,
) -> dict[str, Any]:
    """Writes both splits and the refusals into ``partial``; return the manifest's counts."""
    with (
        SplitWriter(partial / "train.arrow") as train,
        SplitWriter(partial / "validation.arrow") as validation,
        (partial / "refused.jsonl").open("w", encoding="utf-8") as refusals,
        progress_line(progress) as show,
    ):
        tally = Tally(settings.strict, refusals)
        ready = _rendered(names, renderer, tally)
        for item, example in _tokenised(ready, tokenizer, settings, tally):
            check_ids(example, tokenizer, vocabulary)
            held_out = in_validation(item.messages, settings.validation_fraction)
            (validation if held_out else train).add(example)
            tally.kept += 1
            tally.tokens += len(example.input_ids)
            show(tally)
            if tally.kept == settings.limit:
                break
    if not tally.kept:
        reasons = "; ".join(tally.first_refusals[:3]) or "the sources hold no records"
        raise ValueError(f"no usable conversation in {', '.join(map(str, names))}: {reasons}")
    return {
        "records": tally.records,
        "train": asdict(train.counts),
        "validation": asdict(validation.counts),
        "refused": dict(tally.refused),
        "adjusted": dict(tally.adjusted),
        "first_refusals": tally.first_refusals,
    }


def _rendered(names: Iterable[str | Path], renderer: ChatRenderer, tally: Tally) -> Iterator[_Ready]:
    for name in names:
        for item in read_conversations(name):
            tally.records += 1
            if isinstance(item, Refusal):
                tally.refuse(item)
                continue
            where = item.source, item.index
            # The tokenizer would turn it into the token itself, which could end or open a turn.
            special = renderer.special_token_in(item.messages)
            if special:
                tally.refuse(Refusal(*where, SPECIAL_TOKEN, special))
                continue
            try:
                rendered = renderer.render(item)
            except NotFound as error:
                tally.refuse(Refusal(*where, NOT_VERBATIM, str(error)))
                continue
            tally.adjusted.update(item.adjusted)
            if not item.finished:
                tally.adjusted[UNFINISHED] += 1
            if rendered.context:
                tally.adjusted[CONTEXT_ONLY] += rendered.context
            yield _Ready(item, rendered)


def _tokenised(
    ready: Iterable[_Ready], tokenizer: Any, settings: PrepareSettings, tally: Tally
) -> Iterator[tuple[_Ready, TokenisedConversation]]:
    for batch in _batches(ready):
        texts = [item.rendered.text for item in batch]
        for item, encoded in zip(batch, encode_all(tokenizer, texts, settings.max_length), strict=True):
            if isinstance(encoded, str):
                refused: Refusal | TokenisedConversation = Refusal(
                    item.conversation.source, item.conversation.index, BAD_FOR_TOKENIZER, encoded
                )
            else:
                refused = _example(item, *encoded, settings, tally)
            if isinstance(refused, Refusal):
                tally.refuse(refused)
            else:
                yield item, refused


def _example(
    item: _Ready,
    ids: Sequence[int],
    offsets: Sequence[tuple[int, int]],
    settings: PrepareSettings,
    tally: Tally,
) -> TokenisedConversation | Refusal:
    where = item.conversation.source, item.conversation.index
    length = settings.max_length
    if len(ids) > length and settings.overlong == "drop":
        beginning = "at least " if len(item.rendered.text) > length * CHARACTERS_PER_TOKEN else ""
        return Refusal(*where, TOO_LONG, f"{beginning}{len(ids)} tokens, max_length {length}")
    mask = assistant_tokens(np.array(offsets[:length], dtype=np.int64), item.rendered)
    if not mask.any():
        return Refusal(*where, NOTHING_LEFT, f"the first answer starts after token {length}")
    if len(ids) > length:
        tally.adjusted[TRUNCATED] += 1
    return TokenisedConversation(
        input_ids=np.array(ids[:length], dtype=np.int32),
        loss_mask=mask,
        id=conversation_id(item.messages),
        source=f"{where[0]}:{where[1]}",
    )


def _batches(ready: Iterable[_Ready]) -> Iterator[list[_Ready]]:
    batch: list[_Ready] = []
    characters = 0
    for item in ready:
        batch.append(item)
        characters += len(item.rendered.text)
        if len(batch) >= _BATCH_RECORDS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _report(output: Path, counts: Mapping[str, Any], seconds: float) -> PrepareReport:
    return PrepareReport(
        output=output,
        records=counts["records"],
        train=SplitCounts(**counts["train"]),
        validation=SplitCounts(**counts["validation"]),
        refused=counts["refused"],
        adjusted=counts["adjusted"],
        first_refusals=tuple(counts["first_refusals"]),
        seconds=seconds,
    )
