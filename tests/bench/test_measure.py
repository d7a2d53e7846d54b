"""Counters, latencies and calibration of generations whose acceptance is known."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from aquiline.bench.agreement import complaint, find_divergences
from aquiline.bench.measure import Case, measure
from aquiline.bench.methods import Bed, Method
from aquiline.bench.metrics import alpha, ece, summarise, tau
from aquiline.bench.recorder import Recorder, judged_nodes
from aquiline.bench.records import Record, record_from_json, record_json
from aquiline.cache import KVCache, new_cache
from aquiline.engine.generate import generate_requests
from aquiline.engine.request import Engine, Request
from aquiline.sampling import SamplingParams
from aquiline.targets.target import TargetInput, TargetOutput
from tests.bench.scripted import ScriptedDrafter, path_bed
from tests.knowing_drafter import KnowingDrafter, known_from

PROMPT = (5, 9, 30)
PLAIN = Method("plain", None, "no drafts")


def case(tokens: int = 41, rows: int = 1) -> Case:
    prompts = tuple((*PROMPT, 40 + i) for i in range(rows))
    return Case("qa", tuple(str(i) for i in range(rows)), 0, prompts, 0.0, tokens)


def truths(bed: Bed, rows: int = 1, tokens: int = 60) -> list[list[int]]:
    """Prompt and greedy continuation of each row of `case`, without drafts and without stops."""
    engine = Engine(bed.target, None, None, ())
    params = SamplingParams(max_new_tokens=tokens)
    requests = [Request(list(prompt), params) for prompt in case(rows=rows).prompts]
    return [output.prompt_tokens + output.token_ids for output in generate_requests(engine, requests)]


def no_end(bed: Bed) -> Bed:
    return Bed(bed.target, bed.tokenizer, (), bed.path, bed.name, bed.heads)


@pytest.fixture(name="bed")
def _bed() -> Bed:
    return no_end(path_bed())


def scripted(bed: Bed, script: list[int], depth: int, confidence: float = 0.5) -> Method:
    drafter = ScriptedDrafter(known_from(truths(bed)), script, depth, confidence)
    return Method("scripted", drafter, "", chain=True)


def test_all_drafts_accepted_gives_depth_plus_one(bed: Bed) -> None:
    record = measure(bed, scripted(bed, [4], 4), case(41))
    # One token from the prompt, then 8 steps of 5.
    assert (record.steps, record.accepted, record.nodes) == (8, 32, 32)
    assert record.offered_at == record.accepted_at == [8, 8, 8, 8]
    assert tau([record])["value"] == 5
    assert alpha([record]) == [1, 1, 1, 1]


def test_known_acceptance_gives_exact_counts(bed: Bed) -> None:
    # Steps accept 0, 1, 2, 3 of chains of 3: 1 + 2 + 3 + 4 tokens a round, 4 rounds and the first token.
    record = measure(bed, scripted(bed, [0, 1, 2, 3], 3), case(41))
    assert (record.steps, record.accepted, record.tokens) == (16, 24, 41)
    assert record.accepted_at == [12, 8, 4]
    assert record.offered_at == [16, 12, 8]
    assert alpha([record]) == [12 / 16, 8 / 12, 4 / 8]
    assert tau([record])["value"] == 1 + 24 / 16
    cell = summarise([record], ["scripted"])[0]
    assert cell["acceptance_by_depth"] == [12 / 16, 8 / 16, 4 / 16]
    assert cell["nodes_per_step"] == 3
    assert cell["alpha"] == alpha([record])


def test_a_drafter_that_is_never_right_gives_one(bed: Bed) -> None:
    record = measure(bed, scripted(bed, [0], 3), case(20))
    assert (record.steps, record.accepted) == (19, 0)
    assert tau([record])["value"] == 1
    assert alpha([record]) == [0] * len(record.offered_at)


def test_calibration_counts_judged_nodes_only(bed: Bed) -> None:
    record = measure(bed, scripted(bed, [0, 1, 2, 3], 3, confidence=0.625), case(41))
    # Judged are the offered nodes: 16 + 12 + 8 of them, 24 accepted; 0.625 lies in bin 12 of 20.
    assert [(i, n, a) for i, (n, _, a) in enumerate(record.calibration) if n] == [(12, 36, 24)]
    assert record.calibration[12][1] == pytest.approx(36 * 0.625)
    assert ece(record.calibration) == pytest.approx(abs(0.625 - 24 / 36))


def test_gaps_and_first_tokens_account_for_all_tokens_and_all_time(bed: Bed) -> None:
    record = measure(bed, scripted(bed, [3, 0], 3), case(21))
    assert [n for _, n in record.gaps[0]] == [4, 1] * 4
    assert record.first_token_seconds[0] + sum(s for s, _ in record.gaps[0]) == pytest.approx(record.seconds)
    assert set(record.phases) >= {"prefill", "draft", "target", "accept", "commit", "extend"}
    assert sum(record.phases.values()) <= record.seconds


def test_a_batch_counts_all_rows(bed: Bed) -> None:
    known = known_from(truths(bed, rows=3))
    method = Method("knows", KnowingDrafter(known, bed.target.shape.vocab_size, error=0, branches=1), "", chain=True)
    record = measure(bed, method, case(21, rows=3))
    assert (record.batch, record.tokens, record.steps, record.accepted) == (3, 63, 12, 48)
    assert len(record.gaps) == len(record.first_token_seconds) == len(record.outputs) == 3
    assert sum(record.phases.values()) <= record.seconds


def test_plain_decoding_and_a_method_emit_the_same_tokens(bed: Bed) -> None:
    method = scripted(bed, [2, 0, 3], 3)
    plain, mine = measure(bed, PLAIN, case()), measure(bed, method, case())
    assert mine.outputs == plain.outputs
    assert find_divergences(bed.target, [mine], plain, case().prompts) == []
    assert tau([plain])["value"] == 1


def test_judged_nodes_of_a_tree_have_ranks_and_outcomes(bed: Bed) -> None:
    known = known_from(truths(bed))
    drafter = Recorder(KnowingDrafter(known, bed.target.shape.vocab_size, depth=2, error=0.5, branches=2))
    engine = Engine(bed.target, drafter, None, ())
    [output] = generate_requests(engine, [Request([*PROMPT, 40], SamplingParams(max_new_tokens=30))])
    nodes = list(judged_nodes(drafter.steps))
    stats = output.stats
    assert sum(node.accepted for node in nodes) == stats.accepted > 0
    # Two siblings are judged at every depth that was offered.
    for depth in (1, 2):
        assert sum(len(node.ranks) == depth for node in nodes) == 2 * stats.offered_at[depth - 1]
    assert {node.ranks for node in nodes} == {(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)}
    assert all(node.confidence is None for node in nodes)


def test_records_survive_json(bed: Bed) -> None:
    record = measure(bed, scripted(bed, [1], 2), case(9))
    again = record_from_json(record_json(record))
    assert record_json(again) == record_json(record)
    assert again.outputs == record.outputs and again.offered_at == record.offered_at
    assert math.isclose(again.seconds, record.seconds, abs_tol=1e-6)


def test_a_wrong_token_is_found_and_judged(bed: Bed) -> None:
    import torch

    plain = measure(bed, PLAIN, case(12))
    outputs = [[*plain.outputs[0][:5], (plain.outputs[0][5] + 1) % 50, *plain.outputs[0][6:]]]
    wrong = Record(**{**vars(plain), "method": "buggy", "outputs": outputs})
    [found] = find_divergences(bed.target, [wrong], plain, case(12).prompts)
    assert (found["position"], found["plain_token"], found["method_token"]) == (5, plain.outputs[0][5], outputs[0][5])
    logits = bed.target.logits([*case().prompts[0], *plain.outputs[0][:5]])  # type: ignore[attr-defined]
    assert found["gap"] == pytest.approx(float(logits[plain.outputs[0][5]] - logits[outputs[0][5]]))
    assert found["noise"] == 0 and not found["near_tie"]
    for dtype in (torch.float32, torch.bfloat16):
        message = complaint([found], dtype, exact=False)
        assert message is not None and "method buggy, qa question 0 turn 0, token 5" in message
    tie = found | {"near_tie": True}
    assert complaint([tie], torch.bfloat16, exact=False) is None
    assert complaint([tie], torch.bfloat16, exact=True) is not None, "no rounding explains it where bits are equal"
    assert complaint([tie], torch.float32, exact=False) is not None
    cut = Record(**{**vars(plain), "outputs": [plain.outputs[0][:7]]})
    [short] = find_divergences(bed.target, [cut], plain, case(12).prompts)
    assert short["position"] == 7 and short["method_token"] == -1 and not short["near_tie"]


def test_methods_that_part_from_one_text_share_its_forwards(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = measure(bed, PLAIN, case(12, rows=2))

    def changed(method: str, at: dict[int, int]) -> Record:
        outputs = [list(output) for output in plain.outputs]
        for row, position in at.items():
            outputs[row][position] = (outputs[row][position] + 1) % 50
        return Record(**{**vars(plain), "method": method, "outputs": outputs})

    records = [changed("a", {0: 9}), changed("b", {0: 4, 1: 6}), changed("c", {0: 9}), changed("d", {})]
    alone = [d for record in records for d in find_divergences(bed.target, [record], plain, case(12, rows=2).prompts)]
    lengths = []
    forward = type(bed.target).forward

    def counting(self: Any, inputs: TargetInput) -> TargetOutput:
        lengths.append(inputs.tokens.shape[1])
        return forward(self, inputs)

    monkeypatch.setattr(type(bed.target), "forward", counting)
    together = find_divergences(bed.target, records, plain, case(12, rows=2).prompts)
    assert together == alone
    found = [(d["method"], d["question"], d["position"]) for d in together]
    assert found == [("a", "0", 9), ("b", "0", 4), ("b", "1", 6), ("c", "0", 9)]
    assert lengths.count(1) == 9 + 6


@dataclass(eq=False)
class Constant:
    """A target whose logits, (V,), are the same everywhere."""

    logits: torch.Tensor
    dtype: torch.dtype
    device = torch.device("cpu")

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        return new_cache(
            layers=1, rows=rows, kv_heads=1, key_dim=1, capacity=capacity, max_capacity=capacity, dtype=self.dtype
        )

    def forward(self, inputs: TargetInput) -> TargetOutput:
        return TargetOutput(self.logits[None, None], None)


@pytest.mark.parametrize(("dtype", "tie"), [(torch.bfloat16, True), (torch.float32, False)])
def test_neighbouring_numbers_of_16_bits_are_a_near_tie(bed: Bed, dtype: torch.dtype, tie: bool) -> None:
    """Branches of a tree may round to the next number even if all single forwards have the same bits."""
    plain = measure(bed, PLAIN, case(4))
    right = plain.outputs[0][2]
    logits = torch.zeros(50)
    logits[right], logits[(right + 1) % 50], logits[(right + 2) % 50] = 16.125, 16.0, 15.0
    target = Constant(logits, dtype)
    for step, expected in ((1, tie), (2, False)):
        outputs = [[*plain.outputs[0][:2], (right + step) % 50, *plain.outputs[0][3:]]]
        wrong = Record(**{**vars(plain), "method": "tree", "outputs": outputs})
        [found] = find_divergences(target, [wrong], plain, case(4).prompts)  # type: ignore[arg-type]
        assert found["near_tie"] is expected
