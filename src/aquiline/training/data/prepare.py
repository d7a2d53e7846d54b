"""Turns conversations into a training set with the target's own template and tokenizer.

Records are streamed: read, render with the chat template, find the assistant's characters, tokenise
in batches, map the characters to tokens, split, write. Memory holds one batch. The output folder
appears complete or not at all. `aquiline.training.data.dataset` reads it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from aquiline.models.cache_folder import appearing_whole
from aquiline.models.files import check_room, locked
from aquiline.training.data.conversations import Conversation, Refusal, read_conversations
from aquiline.training.data.dataset import FORMAT, SplitWriter, TokenisedConversation
from aquiline.training.data.masks import ChatRenderer, Rendered
from aquiline.training.data.messages import Message, conversation_id, in_validation
from aquiline.training.data.scaffold import NotFound, Rejected
from aquiline.training.data.sources import Unusable
from aquiline.training.data.tally import PrepareReport, Tally, progress_line
from aquiline.training.data.tokens import (
    CHARACTERS_PER_TOKEN,
    Encoded,
    assistant_tokens,
    check_ids,
    encode_all,
    known_ids,
    load_tokenizer,
    tokenizer_hash,
)
from aquiline.training.settings import PrepareSettings

NOT_VERBATIM = "assistant turn not found verbatim"
REJECTED = "rejected by the chat template"
SPECIAL_TOKEN = "special token in the text"
TOO_LONG = "longer than max_length"
NOTHING_LEFT = "no assistant token within max_length"
TRUNCATED = "truncated to max_length"
BAD_FOR_TOKENIZER = "the tokenizer fails on the text"
CONTEXT_ONLY = "earlier answer without loss: the template prints it other than it was generated"
UNFINISHED = "last answer unfinished: ends without an end of turn"

logger = logging.getLogger("aquiline")

_BATCH_RECORDS = 256
_BATCH_CHARACTERS = 500_000


@dataclass(frozen=True)
class _Ready:
    """A rendered conversation that is not tokenised yet."""

    conversation: Conversation
    rendered: Rendered

    @property
    def messages(self) -> tuple[Message, ...]:
        """The turns; of a preformatted text, the text before its first answer and the rest."""
        text, first = self.rendered.text, self.rendered.spans[0][0]
        return self.conversation.messages or (Message("user", text[:first]), Message("assistant", text[first:]))


@dataclass(frozen=True)
class _Job:
    """Sources, and how their conversations become tokens; `vocabulary`: ids that the target knows, if known."""

    names: Sequence[str | Path]
    tokenizer: Any
    renderer: ChatRenderer
    settings: PrepareSettings
    vocabulary: int | None


def prepare(
    sources: Sequence[str | Path] | str | Path,
    target_path: str | Path,
    output: str | Path,
    *,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: bool = False,
    **settings: Any,
) -> PrepareReport:
    """Tokenises conversations with the target's chat template into a training set.

    The loss mask is True exactly on the assistant's tokens, each turn's end-of-turn token included. A hash of the
    first user turn decides the split, so all answers to a prompt, from any source and run, are in the same one.

    Args:
        sources: files or dataset names, see `read_conversations`.
        target_path: folder with the target's tokenizer.
        output: folder to create; appears only when complete.
        chat_template: replaces the tokenizer's own template.
        chat_template_kwargs: variables of the template; a record's ``chat_template_kwargs`` take precedence.
        overwrite: replace an existing `output`.
        settings: fields of `PrepareSettings`, such as ``max_length=512``.

    Raises:
        ValueError: for an invalid setting, source, tokenizer or output, and if no conversation is usable.
    """
    names, output = [sources] if isinstance(sources, str | Path) else list(sources), Path(output)
    chosen = PrepareSettings(**settings)
    _check_output(output, overwrite)
    _warn_of_little_room(names, output)
    tokenizer = load_tokenizer(target_path)
    renderer = ChatRenderer(tokenizer, chat_template, chat_template_kwargs)
    job = _Job(names, tokenizer, renderer, chosen, known_ids(Path(target_path)))
    with locked(output), appearing_whole(output) as partial:
        _check_output(output, overwrite)  # another run may have made it in the meantime
        report = _write(job, output, partial, progress)
        (partial / "manifest.json").write_text(_manifest(job, report, chat_template_kwargs or {}), encoding="utf-8")
    return report


def _check_output(output: Path, overwrite: bool) -> None:
    if output.exists() and not overwrite:
        raise ValueError(f"{output} exists; choose another folder, or allow overwriting it")
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file, and a training set is a folder; choose another output")


def _warn_of_little_room(names: Sequence[str | Path], output: Path) -> None:
    # About 4 characters are a token, which takes 5 bytes; how many records are refused or cut is not known yet.
    size = sum(Path(name).stat().st_size for name in names if Path(name).is_file())
    try:
        check_room(output, size)
    except ValueError as error:
        logger.warning("the set may not fit: %s", error)


def _manifest(job: _Job, report: PrepareReport, template_settings: Mapping[str, Any]) -> str:
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "sources": [_describe(name) for name in job.names],
        "tokenizer_hash": tokenizer_hash(job.tokenizer),
        "template_hash": hashlib.sha256(job.renderer.template.encode()).hexdigest(),
        "settings": asdict(job.settings),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("transformers", "tokenizers", "pyarrow")},
        },
        "counts": {name: count for name, count in asdict(report).items() if name not in ("output", "seconds")},
    }
    if template_settings:
        manifest["chat_template_kwargs"] = dict(template_settings)
    return json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"


def _describe(source: str | Path) -> dict[str, Any]:
    path = Path(source)
    if not path.is_file():  # a dataset, or a pipe that can be read only once
        return {"name": str(source)}
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _write(job: _Job, output: Path, partial: Path, progress: bool) -> PrepareReport:
    """Writes both splits and the refusals into `partial`."""
    with (
        SplitWriter(partial / "train.arrow") as train,
        SplitWriter(partial / "validation.arrow") as validation,
        (partial / "refused.jsonl").open("w", encoding="utf-8") as listed,
        progress_line(progress) as show,
    ):
        tally = Tally(job.settings.strict, listed)
        for item, example in _tokenised(job, tally):
            check_ids(example, job.tokenizer, job.vocabulary)
            held_out = in_validation(item.messages, job.settings.validation_fraction)
            (validation if held_out else train).add(example)
            tally.kept += 1
            tally.tokens += len(example.input_ids)
            show(tally)
            if tally.kept == job.settings.limit:
                break
    if not tally.kept:
        reasons = "; ".join(tally.refused.first[:3]) or "the sources hold no records"
        raise ValueError(f"no usable conversation in {', '.join(map(str, job.names))}: {reasons}")
    return tally.report(output, train.counts, validation.counts)


def _rendered(job: _Job, tally: Tally) -> Iterator[_Ready]:
    for name in job.names:
        for item in read_conversations(name):
            tally.records += 1
            if isinstance(item, Refusal):
                tally.refuse(item)
                continue
            try:
                rendered = _render(item, job.renderer)
            except Unusable as error:
                tally.refuse(Refusal(item.source, item.index, error.reason, error.detail))
                continue
            tally.adjusted.update(item.adjusted)
            # Adds nothing for 0, not even the key.
            tally.adjusted += {UNFINISHED: int(not item.finished), CONTEXT_ONLY: rendered.context}
            yield _Ready(item, rendered)


def _render(conversation: Conversation, renderer: ChatRenderer) -> Rendered:
    # The tokenizer would turn it into the token itself, which could end or open a turn.
    if special := renderer.special_token_in(conversation.messages):
        raise Unusable(SPECIAL_TOKEN, special)
    try:
        return renderer.render(conversation)
    except Rejected as error:
        raise Unusable(REJECTED, str(error)) from error
    except NotFound as error:
        raise Unusable(NOT_VERBATIM, str(error)) from error


def _tokenised(job: _Job, tally: Tally) -> Iterator[tuple[_Ready, TokenisedConversation]]:
    for batch in _batches(_rendered(job, tally)):
        texts = [item.rendered.text for item in batch]
        for item, encoded in zip(batch, encode_all(job.tokenizer, texts, job.settings.max_length), strict=True):
            try:
                example = _example(item, encoded, job.settings, tally)
            except Unusable as error:
                where = item.conversation
                tally.refuse(Refusal(where.source, where.index, error.reason, error.detail))
                continue
            yield item, example


def _example(item: _Ready, encoded: Encoded | str, settings: PrepareSettings, tally: Tally) -> TokenisedConversation:
    if isinstance(encoded, str):
        raise Unusable(BAD_FOR_TOKENIZER, encoded)
    ids, offsets = encoded
    length = settings.max_length
    if len(ids) > length and settings.overlong == "drop":
        beginning = "at least " if len(item.rendered.text) > length * CHARACTERS_PER_TOKEN else ""
        raise Unusable(TOO_LONG, f"{beginning}{len(ids)} tokens, max_length {length}")
    mask = assistant_tokens(np.array(offsets[:length], dtype=np.int64), item.rendered)
    if not mask.any():
        raise Unusable(NOTHING_LEFT, f"the first answer starts after token {length}")
    if len(ids) > length:
        tally.adjusted[TRUNCATED] += 1
    return TokenisedConversation(
        input_ids=np.array(ids[:length], dtype=np.int32),
        loss_mask=mask,
        id=conversation_id(item.messages),
        source=f"{item.conversation.source}:{item.conversation.index}",
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
