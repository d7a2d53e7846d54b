"""From files of conversations to a training set and back."""

from __future__ import annotations

import gzip
import json
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aquiline.models.files import locked
from aquiline.training.data import prepare as data
from aquiline.training.data import tokens
from aquiline.training.data.conversations import (
    EMPTY_TURN,
    LEADING_DROPPED,
    NO_CONVERSATION,
    ROLES,
    TRAILING_DROPPED,
    UNSUPPORTED,
    Conversation,
    Message,
    Refusal,
    read_conversations,
)
from aquiline.training.data.prepare import in_validation, open_training_set, prepare, tokenizer_hash
from aquiline.training.data.sources import CUT, MALFORMED
from tests.training.chat_templates import QWEN3_FIELDS

TALKS = [
    [("user", "Name a red fruit."), ("assistant", "A cherry, for one.")],
    [
        ("system", "Answer like a sailor."),
        ("user", "How deep is the harbour?"),
        ("assistant", "Four fathoms at low water, mate.\nMind the rocks!"),
        ("user", "And the tide?"),
        ("assistant", "Comes in at six. 🌊"),
    ],
    [("user", "Sum 2 and 3 in Python"), ("assistant", "```python\nprint(2 + 3)\n```")],
]


def as_messages(talk: list[tuple[str, str]]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in talk]}


def as_sharegpt(talk: list[tuple[str, str]]) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [{"from": names[role], "value": text} for role, text in talk]
    return {"id": "x_0", "conversations": turns}


def contents(items: list[Conversation | Refusal]) -> list[list[tuple[str, str]]]:
    return [[(m.role, m.content) for m in item.messages] for item in items if isinstance(item, Conversation)]


def refusals(items: list[Conversation | Refusal]) -> list[tuple[int, str]]:
    return [(item.index, item.reason) for item in items if isinstance(item, Refusal)]


def lines(records: list[Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def write(path: Path, kind: str) -> None:
    """Write TALKS in one of the understood ways, under a name that says nothing."""
    messages = [as_messages(talk) for talk in TALKS]
    sharegpt = [as_sharegpt(talk) for talk in TALKS]
    table = pa.Table.from_pylist(messages)
    if kind == "sharegpt array":
        path.write_text(json.dumps(sharegpt, indent=1), encoding="utf-8")
    elif kind == "gzipped array":
        path.write_bytes(gzip.compress(json.dumps(messages).encode()))
    elif kind == "lines":
        path.write_text(lines(messages[:2]) + "\n" + lines(sharegpt[2:]), encoding="utf-8")
    elif kind == "lines after a mark":
        path.write_bytes(b"\xef\xbb\xbf" + lines(messages).encode())
    elif kind == "gzipped lines":
        path.write_bytes(gzip.compress(lines(messages).encode()))
    elif kind == "indented objects":
        path.write_text("\n".join(json.dumps(r, indent=2) for r in messages), encoding="utf-8")
    elif kind == "parquet":
        pq.write_table(table, path)
    elif kind == "arrow file":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        assert kind == "arrow stream"
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)


KINDS = [
    "sharegpt array",
    "gzipped array",
    "lines",
    "lines after a mark",
    "gzipped lines",
    "indented objects",
    "parquet",
    "arrow file",
    "arrow stream",
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_container_is_told_by_its_content(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "talks", kind)
    items = list(read_conversations(tmp_path / "talks"))
    assert refusals(items) == []
    assert contents(items) == TALKS


def test_alpaca_records(tmp_path: Path) -> None:
    records = [
        {"instruction": "Translate to French.", "input": "Good day", "output": "Bonjour"},
        {"instruction": "Name a colour.", "input": "", "output": "Blue", "system": "Be brief."},
    ]
    (tmp_path / "alpaca.json").write_text(json.dumps(records))
    assert contents(list(read_conversations(tmp_path / "alpaca.json"))) == [
        [("user", "Translate to French.\n\nGood day"), ("assistant", "Bonjour")],
        [("system", "Be brief."), ("user", "Name a colour."), ("assistant", "Blue")],
    ]


def test_a_cut_at_any_byte_keeps_every_whole_record(tmp_path: Path) -> None:
    records = [json.dumps(as_sharegpt(talk), ensure_ascii=False).encode() for talk in TALKS]
    whole = b"[" + b", ".join(records) + b"]"
    ends = np.cumsum([1 + len(records[0]), 2 + len(records[1]), 2 + len(records[2])])
    for size in range(1, len(whole)):
        (tmp_path / "cut.json").write_bytes(whole[:size])
        items = list(read_conversations(tmp_path / "cut.json"))
        kept = int((ends <= size).sum())
        assert contents(items) == TALKS[:kept], size
        assert refusals(items) == [(kept + 1, CUT)], size


def test_cut_lines_and_cut_gzip(tmp_path: Path) -> None:
    text = lines([as_messages(talk) for talk in TALKS]).encode()
    (tmp_path / "cut.jsonl").write_bytes(text[:-20])
    items = list(read_conversations(tmp_path / "cut.jsonl"))
    assert contents(items) == TALKS[:2]
    assert refusals(items) == [(3, CUT)]

    many = lines([as_messages(TALKS[0]) | {"noise": f"{i * 7919 % 10007}"} for i in range(2000)])
    packed = gzip.compress(many.encode())
    (tmp_path / "cut.gz").write_bytes(packed[: len(packed) * 2 // 3])
    items = list(read_conversations(tmp_path / "cut.gz"))
    assert 500 < len(contents(items)) < 2000
    assert refusals(items) == [(len(items), CUT)]


def test_a_fault_inside_an_array_is_no_cut(tmp_path: Path) -> None:
    records = [json.dumps(as_messages(talk)) for talk in TALKS]
    (tmp_path / "bad.json").write_text(f"[{records[0]}, {records[1]}, oops, {records[2]}]")
    items = list(read_conversations(tmp_path / "bad.json"))
    assert contents(items) == TALKS
    assert refusals(items) == [(3, MALFORMED)]


def turns(*names: str) -> dict[str, Any]:
    return {"messages": [{"role": name, "content": f"{name} speaks"} for name in names]}


UNUSABLE: list[tuple[Any, str, str]] = [
    (turns("user", "user", "assistant"), ROLES, "turn 2 is user, expected assistant"),
    (turns("user", "assistant", "assistant"), ROLES, "turn 3 is assistant, expected user"),
    (turns("user", "system", "assistant"), ROLES, "turn 2 is system"),
    (turns("user", "assistant", "system"), ROLES, "turn 3 is system"),
    (turns("system", "assistant"), NO_CONVERSATION, "no user turn with an answer"),
    (turns("user"), NO_CONVERSATION, "no user turn with an answer"),
    (turns(), NO_CONVERSATION, "no user turn"),
    (turns("user", "oracle"), UNSUPPORTED, "'oracle'; allowed: assistant"),
    ({"messages": "hello"}, NO_CONVERSATION, "'messages' is str, not a list"),
    ({"messages": ["hello"]}, NO_CONVERSATION, "turn 1 is str"),
    ({"chosen": "hello"}, NO_CONVERSATION, "keys: chosen"),
    ({}, NO_CONVERSATION, "keys: none"),
    ([1], NO_CONVERSATION, "the record is list"),
    (None, NO_CONVERSATION, "the record is null"),
    ({"instruction": "x", "output": " \n"}, EMPTY_TURN, "turn 2 (assistant) is empty"),
    ({"instruction": "x", "output": None}, EMPTY_TURN, "turn 2 has no content"),
    ({"instruction": "x", "output": 3}, UNSUPPORTED, "turn 2's content is int"),
    ({"instruction": "x", "output": "\ud83d"}, "invalid Unicode", "turn 2 holds half"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        UNSUPPORTED,
        "parts that are not text",
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        UNSUPPORTED,
        "turn 1 calls tools",
    ),
]


@pytest.mark.parametrize(("record", "reason", "words"), UNUSABLE)
def test_unusable_records_are_named(record: Any, reason: str, words: str, tmp_path: Path) -> None:
    good = as_messages(TALKS[0])
    (tmp_path / "talks.jsonl").write_text(lines([good, record, good]))
    first, refusal, last = read_conversations(tmp_path / "talks.jsonl")
    assert isinstance(first, Conversation) and isinstance(last, Conversation)
    assert isinstance(refusal, Refusal)
    assert (refusal.index, refusal.reason) == (2, reason)
    assert words in refusal.detail
    assert str(refusal).startswith("talks.jsonl, record 2: ")


def test_a_malformed_line_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    good = json.dumps(as_messages(TALKS[0]))
    (tmp_path / "talks.jsonl").write_bytes(f"{good}\n{good[:-3]}\n".encode() + b"{\xff}\n" + good.encode())
    items = list(read_conversations(tmp_path / "talks.jsonl"))
    assert len(contents(items)) == 2
    assert refusals(items) == [(2, MALFORMED), (3, MALFORMED)]


def test_half_exchanges_at_the_ends_are_dropped_and_said(tmp_path: Path) -> None:
    (tmp_path / "talks").write_text(
        lines([turns("assistant", "user", "assistant"), turns("system", "user", "assistant", "user")])
    )
    first, second = read_conversations(tmp_path / "talks")
    assert isinstance(first, Conversation) and isinstance(second, Conversation)
    assert [m.role for m in first.messages] == ["user", "assistant"]
    assert first.adjusted == (LEADING_DROPPED,)
    assert [m.role for m in second.messages] == ["system", "user", "assistant"]
    assert second.adjusted == (TRAILING_DROPPED,)


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "is empty"), ("<html>", "allowed: a JSON array"), (None, "is not a file")],
)
def test_sources_that_are_none(text: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    if text is not None:
        (tmp_path / "source").write_text(text)
    with pytest.raises(ValueError, match=words):
        list(read_conversations(tmp_path / "source"))


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("owner/set", ("owner/set", None, "train")),
        ("owner/set:test", ("owner/set", None, "test")),
        ("owner/set:small:test", ("owner/set", "small", "test")),
    ],
)
def test_a_dataset_is_streamed_by_name(name: str, asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(path: str, config: str | None, *, split: str, streaming: bool) -> Any:
        assert (path, config, split) == asked
        assert streaming
        return (as_messages(talk) for talk in TALKS)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    items = list(read_conversations(name))
    assert contents(items) == TALKS
    assert items[0].source == name


def test_a_dataset_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match=r"cannot be loaded: no route to the hub; give .* path"):
        list(read_conversations("owner/set"))


def test_reading_takes_constant_memory(tmp_path: Path) -> None:
    record = json.dumps(as_messages([("user", "x" * 2000), ("assistant", "y" * 2000)]))
    peaks = []
    for count in (200, 4000):
        (tmp_path / "talks.json").write_text(f"[{', '.join([record] * count)}]")
        tracemalloc.start()
        assert sum(isinstance(item, Conversation) for item in read_conversations(tmp_path / "talks.json")) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 1_000_000  # the second file is 15 MB larger


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write(tmp_path / "talks", "lines")
    return tmp_path / "talks"


def test_prepared_tokens_and_masks(source: Path, smollm2_folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    report = prepare(source, smollm2_folder, tmp_path / "set", max_length=200, validation_fraction=0)
    training = open_training_set(tmp_path / "set", tokenizer_hash=tokenizer_hash(tokenizer))
    assert len(training) == report.train.conversations == 3
    for example, talk in zip(training, TALKS, strict=True):
        messages = [{"role": role, "content": text} for role, text in talk]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert tokenizer.decode(example.input_ids) == text
        answers = [answer + "<|im_end|>" for role, answer in talk if role == "assistant"]
        assert tokenizer.decode(example.input_ids[example.loss_mask]) == "".join(answers)
        # Ends of turns: as many as answers, and each is the last token of its run.
        run_ends = example.loss_mask & ~np.append(example.loss_mask[1:], False)
        assert tokenizer.decode(example.input_ids[run_ends]) == "<|im_end|>" * len(answers)
    assert training.lengths.tolist() == [len(example.input_ids) for example in training]
    assert report.train.tokens == training.lengths.sum()
    assert report.train.loss_tokens == sum(int(example.loss_mask.sum()) for example in training)
    assert [example.source for example in training] == ["talks:1", "talks:2", "talks:4"]


def test_an_unfinished_answer_ends_without_an_end_of_turn(smollm2_folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "talks").write_text(lines([as_messages(TALKS[1]) | {"finished": False}]))
    report = prepare(tmp_path / "talks", smollm2_folder, tmp_path / "set", max_length=99)
    assert report.adjusted == {data.UNFINISHED: 1}
    parts = (open_training_set(tmp_path / "set", split=split) for split in ("train", "validation"))
    [example] = [example for part in parts for example in part]
    answers = [text for role, text in TALKS[1] if role == "assistant"]
    masked = tokenizer.decode(example.input_ids[example.loss_mask])
    assert masked == f"{answers[0]}<|im_end|>{answers[1]}"
    assert example.loss_mask[-1]


def test_any_index_of_many_batches(smollm2_folder: Path, tmp_path: Path) -> None:
    talks = [as_messages([("user", f"Say {i}"), ("assistant", f"{i}")]) for i in range(600)]
    (tmp_path / "talks").write_text(lines(talks))
    prepare(tmp_path / "talks", smollm2_folder, tmp_path / "set", max_length=99, validation_fraction=0)
    training = open_training_set(tmp_path / "set")
    for index in (599, 0, 255, 256, 511, 512, 300):
        assert training[index].source == f"talks:{index + 1}"
        assert len(training[index].input_ids) == training.lengths[index]
    assert training[-1].source == "talks:600"
    with pytest.raises(IndexError):
        training[600]


def test_overlong_conversations(source: Path, smollm2_folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_length": 45, "validation_fraction": 0}
    cut = prepare(source, smollm2_folder, tmp_path / "cut", **options)
    dropped = prepare(source, smollm2_folder, tmp_path / "dropped", overlong="drop", **options)
    whole = prepare(source, smollm2_folder, tmp_path / "whole", max_length=200, validation_fraction=0)
    lengths = open_training_set(whole.output).lengths
    long = int((lengths > 45).sum())
    assert 0 < long < 3
    assert cut.adjusted == {data.TRUNCATED: long}
    assert sorted(open_training_set(cut.output).lengths) == sorted(np.minimum(lengths, 45))
    assert dropped.refused == {data.TOO_LONG: long}
    assert dropped.train.conversations == 3 - long
    short = prepare(source, smollm2_folder, tmp_path / "short", max_length=26, validation_fraction=0)
    assert short.refused[data.NOTHING_LEFT] >= 1


def test_the_split_is_by_prompt_and_stable() -> None:
    def held_out(prompt: str, answer: str, fraction: float = 0.3) -> bool:
        return in_validation([Message("user", prompt), Message("assistant", answer)], fraction)

    prompts = [f"Question {i}" for i in range(1000)]
    chosen = [prompt for prompt in prompts if held_out(prompt, "a")]
    assert 240 < len(chosen) < 360
    assert chosen == [prompt for prompt in prompts if held_out(prompt, "another answer")]
    assert {p for p in prompts if held_out(p, "a", 0.1)} < set(chosen)
    # Recorded: an upgrade must not move conversations across the split.
    assert chosen[:6] == RECORDED


RECORDED = [f"Question {i}" for i in (3, 6, 10, 12, 22, 29)]


def test_both_splits_are_written(smollm2_folder: Path, tmp_path: Path) -> None:
    talks = [as_messages([("user", f"Say {i}"), ("assistant", f"{i}")]) for i in range(40)]
    (tmp_path / "talks").write_text(lines(talks))
    report = prepare(tmp_path / "talks", smollm2_folder, tmp_path / "set", max_length=99, validation_fraction=0.4)
    train = open_training_set(tmp_path / "set")
    validation = open_training_set(tmp_path / "set", split="validation")
    assert len(validation) == report.validation.conversations > 5
    assert len(train) == report.train.conversations > 5
    assert len({example.id for part in (train, validation) for example in part}) == 40


def test_the_manifest_tells_what_it_was_made_from(source: Path, smollm2_folder: Path, tmp_path: Path) -> None:
    sets = []
    for name in ("one", "two"):
        prepare(source, smollm2_folder, tmp_path / name, max_length=45, validation_fraction=0)
        sets.append(open_training_set(tmp_path / name))
    assert sets[0].fingerprint == sets[1].fingerprint
    manifest = sets[0].manifest
    [described] = manifest["sources"]
    assert described["bytes"] == source.stat().st_size
    assert len(described["sha256"]) == len(manifest["template_hash"]) == 64
    assert manifest["settings"]["max_length"] == 45
    assert manifest["counts"]["train"]["conversations"] == 3
    prepare(source, smollm2_folder, tmp_path / "two", max_length=46, overwrite=True)
    assert open_training_set(tmp_path / "two").fingerprint != sets[0].fingerprint


def test_refused_records_are_counted_and_listed(smollm2_folder: Path, tmp_path: Path) -> None:
    bad = [turns("user", "user", "assistant"), as_messages([("user", "Hi"), ("assistant", "Bye<|im_end|>")])]
    (tmp_path / "talks").write_text(lines([as_messages(TALKS[0]), *bad]))
    output = tmp_path / "set"
    report = prepare(tmp_path / "talks", smollm2_folder, output, max_length=99)
    assert report.records == 3
    assert report.refused == {ROLES: 1, data.SPECIAL_TOKEN: 1}
    listed = [json.loads(line) for line in (output / "refused.jsonl").read_text().splitlines()]
    assert [(item["index"], item["reason"]) for item in listed] == [(2, ROLES), (3, data.SPECIAL_TOKEN)]
    assert "record 2: roles out of order" in report.first_refusals[0]
    with pytest.raises(ValueError, match="record 2: roles out of order"):
        prepare(tmp_path / "talks", smollm2_folder, output, max_length=99, strict=True, overwrite=True)
    assert len(open_training_set(output)) + len(open_training_set(output, split="validation")) == 1


def test_a_template_that_changes_the_text(source: Path, smollm2_folder: Path, tmp_path: Path) -> None:
    upper = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | upper }}<|im_end|>\n{% endfor %}"
    with pytest.raises(ValueError, match=r"not verbatim|not found verbatim"):
        prepare(source, smollm2_folder, tmp_path / "set", max_length=99, chat_template=upper)


def test_the_progress_line_counts(
    source: Path, smollm2_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(source, smollm2_folder, tmp_path / "set", max_length=99, progress=True)
    assert "3 records, 3 kept, 0 refused" in capsys.readouterr().err


def test_settings_of_the_template(smollm2_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "talks").write_text(lines([as_messages(TALKS[0])]))
    options: dict[str, Any] = {"max_length": 99, "validation_fraction": 0, "chat_template": QWEN3_FIELDS}
    off = prepare(
        tmp_path / "talks", smollm2_folder, tmp_path / "off", chat_template_kwargs={"enable_thinking": False}, **options
    )
    on = prepare(tmp_path / "talks", smollm2_folder, tmp_path / "on", **options)
    assert off.train.loss_tokens == on.train.loss_tokens
    assert off.train.tokens > on.train.tokens, "an empty thought stands in the prompt"


def test_an_answer_without_loss_is_counted(smollm2_folder: Path, tmp_path: Path) -> None:
    thinks = [("user", "2 + 2?"), ("assistant", "<think>\nA sum.\n</think>\n\n4"), *TALKS[0]]
    (tmp_path / "talks").write_text(lines([as_messages(thinks)]))
    report = prepare(tmp_path / "talks", smollm2_folder, tmp_path / "set", max_length=99, chat_template=QWEN3_FIELDS)
    assert report.adjusted == {data.CONTEXT_ONLY: 1}


def test_a_long_text_is_cut_before_it_is_tokenised(
    smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ["word " * 20_000, "x" * 100_000, "A short one."]
    (tmp_path / "talks").write_text(lines([as_messages([("user", "Go"), ("assistant", text)]) for text in answers]))
    whole = prepare(tmp_path / "talks", smollm2_folder, tmp_path / "whole", max_length=100_000, validation_fraction=0)
    seen: list[int] = []
    real = tokens.tokenized

    def watched(tokenizer: Any, texts: list[str], **options: Any) -> Any:
        seen.extend(len(text) for text in texts)
        return real(tokenizer, texts, **options)

    monkeypatch.setattr(tokens, "tokenized", watched)
    for overlong in ("truncate", "drop"):
        seen.clear()
        cut = prepare(
            tmp_path / "talks",
            smollm2_folder,
            tmp_path / overlong,
            max_length=50,
            overlong=overlong,
            validation_fraction=0,
        )
        assert seen.count(800) == 2, "50 tokens are looked for in 800 characters"
        assert sum(size > 100_000 for size in seen) == 1, "one word without an end cannot be cut"
        assert cut.train.conversations == (3 if overlong == "truncate" else 1)
    for example, full in zip(open_training_set(tmp_path / "truncate"), open_training_set(whole.output), strict=True):
        assert example.input_ids.tolist() == full.input_ids[:50].tolist()


def test_an_id_beyond_the_vocabulary_is_named(source: Path, smollm2_folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((smollm2_folder / name).read_bytes())
    (tmp_path / "config.json").write_text('{"vocab_size": 30000}')
    with pytest.raises(ValueError, match=r"talks:1: .* the id \d+, .* below 30000 .vocab_size.*resize"):
        prepare(source, tmp_path, tmp_path / "set", max_length=99)


def test_a_text_on_which_the_tokenizer_fails_is_refused(
    smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talks").write_text(lines([as_messages(talk) for talk in TALKS]))
    real = tokens.tokenized

    def fails(tokenizer: Any, texts: list[str], **options: Any) -> Any:
        if any("sailor" in text for text in texts):
            raise ValueError("the tokenizer fails on this text (too many retries)")
        return real(tokenizer, texts, **options)

    monkeypatch.setattr(tokens, "tokenized", fails)
    report = prepare(tmp_path / "talks", smollm2_folder, tmp_path / "set", max_length=99)
    assert report.refused == {data.BAD_FOR_TOKENIZER: 1}
    assert "talks, record 2" in report.first_refusals[0] and "too many retries" in report.first_refusals[0]


def test_one_writer_and_no_remains(source: Path, smollm2_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "set"
    with locked(output), pytest.raises(ValueError, match=r"written by another process .pid \d+"):
        prepare(source, smollm2_folder, output, max_length=99)
    (tmp_path / ".set.partial").mkdir()
    (tmp_path / ".set.partial" / "of a killed run").write_text("x")
    prepare(source, smollm2_folder, output, max_length=99)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set", "talks"]
    with pytest.raises(ValueError, match="is a file"):
        prepare(source, smollm2_folder, source, max_length=99, overwrite=True)


def test_limit(source: Path, smollm2_folder: Path, tmp_path: Path) -> None:
    report = prepare(source, smollm2_folder, tmp_path / "set", max_length=99, limit=2)
    assert report.train.conversations + report.validation.conversations == 2


def test_nothing_appears_if_it_fails(
    source: Path, smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(source, smollm2_folder, tmp_path / "set", max_length=99)
    before = open_training_set(tmp_path / "set").fingerprint

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(data.SplitWriter, "add", fail)
    for name in ("set", "new"):
        with pytest.raises(OSError, match=f"No space left on device: .*{name}"):
            prepare(source, smollm2_folder, tmp_path / name, max_length=99, overwrite=True)
    assert open_training_set(tmp_path / "set").fingerprint == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set", "talks"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_length": 3}, "max_length is 3; allowed"),
        ({"overlong": "wrap"}, "overlong is 'wrap'; allowed: truncate, drop"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0"),
        ({"limit": 0}, "limit is 0"),
    ],
)
def test_bad_settings(options: dict[str, Any], words: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        prepare(source, tmp_path, tmp_path / "set", **{"max_length": 99, **options})


def test_bad_targets_and_outputs(source: Path, smollm2_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        prepare(source, tmp_path / "none", tmp_path / "set", max_length=99)
    (tmp_path / "set").mkdir()
    with pytest.raises(ValueError, match="exists; choose another"):
        prepare(source, smollm2_folder, tmp_path / "set", max_length=99)
    with pytest.raises(ValueError, match="no tokenizer could be loaded"):
        prepare(source, tmp_path / "set", tmp_path / "other", max_length=99)


def test_bad_training_sets(source: Path, smollm2_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a training set.*`prepare`"):
        open_training_set(tmp_path)
    prepare(source, smollm2_folder, tmp_path / "set", max_length=99, validation_fraction=0)
    with pytest.raises(ValueError, match="prepared for another tokenizer"):
        open_training_set(tmp_path / "set", tokenizer_hash="0" * 64)
    with pytest.raises(ValueError, match="allowed: train, validation"):
        open_training_set(tmp_path / "set", split="test")  # type: ignore[arg-type]
    stored = (tmp_path / "set" / "train.arrow").read_bytes()
    (tmp_path / "set" / "train.arrow").write_bytes(stored[: len(stored) // 2])
    with pytest.raises(ValueError, match="missing or damaged"):
        open_training_set(tmp_path / "set")


def test_tokenizer_hash_follows_the_vocabulary(tokenizer: Any) -> None:
    before = tokenizer_hash(tokenizer)
    tokenizer.chat_template = None
    assert tokenizer_hash(tokenizer) == before
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_hash(tokenizer) != before
