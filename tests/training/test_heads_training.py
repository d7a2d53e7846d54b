"""Training of Medusa and Hydra heads and small models: what is learned from what, resume, results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aquiline.checkpoints.open import read_parallel_heads
from aquiline.drafters.parallel import ParallelDrafter
from aquiline.drafters.small_model import SmallModel
from aquiline.drafters.trees import Chain
from aquiline.engine.drafting import make_drafter
from aquiline.sampling import SamplingParams
from aquiline.targets.decoder import config_from_hf
from aquiline.targets.loading import load_target
from aquiline.training import heads_training
from aquiline.training.features import compute_features
from aquiline.training.heads_training import train_heads
from aquiline.training.learners.new_students import copied_layers, new_student, small_config, small_model_json
from aquiline.training.learners.regression import Regression
from aquiline.training.learners.student_validation import measure_student
from aquiline.training.learners.students import counted, lesson, rows_that_count, student_loss
from aquiline.training.settings import PARALLEL, SMALL, TrainSettings
from tests import tiny
from tests.drafters.loop import assert_equal_to_plain, rows_of
from tests.training.tiny_training import write_set, write_target


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    write_target(folder / "target")
    write_set(folder / "set", 6, 14)
    return folder


def settings(base: Path, output: str, kind: str, **changes) -> TrainSettings:
    sizes = {"num_layers": 4} if kind in SMALL else {"num_heads": 3}
    values = sizes | {
        "draft_vocab_size": 97,
        "max_length": 32,
        "batch_positions": 60,
        "micro_positions": 25,
        "total_positions": 700,
        "warmup_positions": 60,
        "log_steps": 1,
        "workers": 1,
        "dtype": "float32",
    }
    return TrainSettings(str(base / "target"), (str(base / "set"),), str(base / output), kind, **(values | changes))


def metrics(base: Path, output: str) -> list[dict]:
    lines = (base / output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("kind", [*PARALLEL, *SMALL])
def test_trains_to_a_drafter_that_equals_plain(base, kind):
    report = train_heads(
        settings(base, kind, kind, total_positions=1500, lr=0.01, **({} if kind in SMALL else {"regress_positions": 0}))
    )
    steps = [record for record in metrics(base, kind) if "loss" in record]
    assert report.stopped == "finished"
    assert report.positions >= 1500
    assert sum(r["loss"] for r in steps[-3:]) < 0.9 * sum(r["loss"] for r in steps[:3])
    (alphas,) = report.acceptance.values()
    assert len(alphas) == (5 if kind == "small-model" else 3)
    target = load_target(base / "target", torch.float32)
    if kind == "small-model":
        small = load_target(base / kind / "head", torch.float32)
        drafter = SmallModel(small, target, Chain(3))
    else:
        heads = read_parallel_heads(base / kind / "head", target.shape)
        assert heads.target_fingerprint
        assert len(heads.config.accuracies) == 3
        drafter, _ = make_drafter(base / kind, None, target, None)
        assert isinstance(drafter, ParallelDrafter)
    assert_equal_to_plain(target, drafter, tiny.prompts(3, seed=8), SamplingParams())


@pytest.mark.parametrize("kind", ["hydra", "small-model"])
def test_a_resumed_run_equals_an_uninterrupted_one_for_any_workers(base, kind, monkeypatch):
    train_heads(settings(base, f"{kind}-whole", kind, total_positions=300))
    step = heads_training._optimiser_step
    calls = []

    def interrupted(run_, pool):
        calls.append(0)
        if len(calls) == 2:
            run_.stopped = "SIGTERM"
        return step(run_, pool)

    monkeypatch.setattr(heads_training, "_optimiser_step", interrupted)
    parts = settings(base, f"{kind}-parts", kind, total_positions=300, workers=2, features=str(base / f"{kind}-kept"))
    assert train_heads(parts).stopped == "SIGTERM"
    parts = replace(parts, workers=1)
    assert train_heads(parts, resume=True).stopped == "finished"
    whole, resumed = (
        torch.load(base / f"{kind}-{name}" / "checkpoint.pt", weights_only=True) for name in ("whole", "parts")
    )
    assert whole["progress"] == resumed["progress"]
    for name, tensor in whole["network"].items():
        assert torch.equal(tensor, resumed["network"][name]), name
    with pytest.raises(ValueError, match=r"other settings .*lr: 0.001 → 0.002"):
        train_heads(replace(parts, lr=0.002), resume=True)


def test_rows_count_where_the_root_and_all_drafts_are_the_assistants():
    """Against a loop over positions, with two turns of the assistant."""
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1, 0], dtype=torch.bool)
    for ahead in (1, 2, 3, 4):
        expected = [
            t + ahead < len(mask) and all(bool(mask[t + i]) for i in range(1, ahead + 1)) for t in range(len(mask))
        ]
        assert counted(mask, ahead).tolist() == expected
    assert counted(mask[:2], 5).tolist() == [False, False]


@pytest.mark.parametrize("kind", [*PARALLEL, *SMALL])
def test_the_loss_is_the_cross_entropy_with_the_targets_law_ahead(base, kind):
    """Against a plain double loop: conversation, position, depth."""
    target = tiny.decoder("llama")
    student = new_student(settings(base, "x", kind), target, target.lm_head.weight).replica()
    generator = torch.Generator().manual_seed(1)
    for parameter in student.network.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    examples = []
    for tokens in tiny.prompts(3, seed=2, longest=9):
        ids = torch.tensor([*tokens, 1, 2, 3])
        mask = torch.arange(len(ids)) >= 2
        examples.append((ids, mask, compute_features(target, ids, ("final",))))
    given, scales = lesson(examples), [0.5, 0.25, 0.125][: student.depths]
    loss, losses, hits = student_loss(student, given, target.lm_head.weight, scales, "kl")
    expected, right = torch.zeros(student.depths, dtype=torch.float64), torch.zeros(student.depths)
    for ids, mask, final in examples:
        laws = target.project(final).softmax(-1)
        for t in range(len(ids)):
            for depth in range(student.depths):
                u = t + student.first - 1 + depth  # the target's law at u is over token u + 1
                if u + 1 >= len(ids) or not bool(mask[t + 1 : u + 2].all()):
                    continue
                if kind == "medusa":
                    stream = student.network.stream(depth, final[t])
                elif kind == "hydra":
                    stream = student.network.stream(depth, final[t], target.embed(ids[t + 1 : u + 1]))
                else:
                    stream = student.streams(lesson([(ids[: t + 1], mask[: t + 1], final[: t + 1])]))[0][-1]
                logits = target.project(stream)
                expected[depth] -= (laws[u] * logits.log_softmax(-1)).sum()
                right[depth] += int(logits.argmax() == laws[u].argmax())
    losses, expected = losses.detach().double(), expected.detach()
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    assert hits.tolist() == right.tolist()
    assert float(loss.detach()) == pytest.approx(
        sum(s * float(e) for s, e in zip(scales, expected, strict=True)), rel=1e-5
    )
    assert [len(r) for r in rows_that_count(student, given)] == [
        sum(int(counted(mask, student.first + d).sum()) for _, mask, _ in examples) for d in range(student.depths)
    ]


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_heads_begin_as_the_regression_of_the_feature_ahead(base, kind):
    """Against numpy's least squares over a double loop; it predicts far better than the identity."""
    target = tiny.decoder("llama", torch.float32)
    student = new_student(settings(base, "x", kind, num_heads=2), target, target.lm_head.weight)
    examples = []
    for prompt in tiny.prompts(40, seed=6):
        ids = torch.tensor(prompt)
        examples.append((ids, torch.arange(len(ids)) >= 1, compute_features(target, ids, ("final",))))
    before = student_loss(student, lesson(examples), target.lm_head.weight, [1.0, 1.0], "kl")[0].item()
    regression = Regression(student)
    for part in (examples[:15], examples[15:]):
        regression.add(lesson(part))
    regression.solve()
    reads, wanted = [], []
    for ids, mask, final in examples:
        for t in range(len(ids) - 3):
            if bool(mask[t + 1 : t + 4].all()):
                path = target.embed(ids[t + 1 : t + 3])
                reads.append(student.network.read(1, final[t], *([path] if kind == "hydra" else [])))
                wanted.append(final[t + 2])
    inputs = torch.cat((torch.stack(reads), torch.ones(len(reads), 1)), dim=1).double()
    ridge = 1e-3 * inputs.square().sum(0).mean() * torch.eye(inputs.shape[1])
    rows = torch.cat((inputs, ridge.sqrt()))
    aims = torch.cat((torch.stack(wanted).double(), torch.zeros(inputs.shape[1], 48)))
    expected = torch.linalg.lstsq(rows, aims).solution
    torch.testing.assert_close(student.network.heads[1].linear.weight.double(), expected[:-1].t(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(student.network.heads[1].linear.bias.double(), expected[-1], rtol=1e-3, atol=1e-3)
    after = student_loss(student, lesson(examples), target.lm_head.weight, [1.0, 1.0], "kl")[0].item()
    assert after < 0.8 * before


@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3", "mistral"])
def test_a_small_model_begins_as_the_targets_layers(base, family):
    """All layers copied is the target itself; its written configuration reads back."""
    target = tiny.decoder(family)
    assert copied_layers(30, 5) == [0, 1, 2, 28, 29]
    raw = tiny.hf_model(family).config.to_dict()
    for layers in (3, 4, 7):
        config = small_config(target.config, layers)
        assert config_from_hf(small_model_json(dict(raw), config)) == config
    student = new_student(
        settings(base, "x", "small-model", num_layers=7, max_length=12), target, target.lm_head.weight
    )
    ids = torch.tensor([5, 6, 7, 8, 9])
    given = lesson([(ids, torch.ones(5, dtype=torch.bool), torch.zeros(5, 48, dtype=torch.float64))])
    final = compute_features(target, ids, ("final",))
    torch.testing.assert_close(student.replica().streams(given)[0], final, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="num_layers is 8, the target has 7"):
        copied_layers(7, 8)


def test_refuses_a_small_model_of_a_window_below_the_texts(base):
    with pytest.raises(ValueError, match="lower it to 12"):
        new_student(settings(base, "x", "small-model"), tiny.decoder("mistral"), tiny.decoder("mistral").lm_head.weight)


def test_measured_acceptance_is_that_of_the_loop(base):
    """On the target's own words, n-α of the validation is n-α of a chain in the engine."""
    from tests.drafters.overfit import student, texts

    target, made = tiny.decoder("llama"), student("hydra", steps=12)
    conversations = []
    for prompt, answer in texts():
        tokens = torch.tensor(prompt + answer)
        conversations.append((tokens, torch.arange(len(tokens)) >= len(prompt)))
    measured = measure_student(made, target, None, conversations)
    from aquiline import decode
    from aquiline.drafters.parallel import ParallelHeads
    from aquiline.stats import GenerationStats

    reached, right = [0, 0, 0], [0, 0, 0]
    for prompt, answer in texts():  # a chain from every position of the answer
        for start in range(len(answer) - 1):
            drafter = ParallelDrafter(ParallelHeads(made.network), target, Chain(3))
            state = decode.new_state(target, drafter, 1, 80)
            text = prompt + answer[:start]
            decode.prefill(target, drafter, state, 0, decode.Occupant(text, tiny.chooser(text), GenerationStats()))
            tree = drafter.propose(rows_of(text + answer[start : start + 1]), state.drafter_state)
            for depth in range(3):
                if start + 1 + depth >= len(answer):
                    break
                reached[depth] += 1
                if int(tree.tokens[0, 1 + depth]) != answer[start + 1 + depth]:
                    break
                right[depth] += 1
    assert measured.rows == reached[0]
    assert measured.alphas == pytest.approx([a / b for a, b in zip(right, reached, strict=True)])
    assert 0 < measured.alphas[0] < 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "eagel"}, "eagel.*allowed: eagle3, eagle, medusa, hydra, small-model"),
        ({"ttt_steps": 2}, "ttt_steps 2 has no effect with kind medusa"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"loss": "mse"}, "allowed: kl"),
        ({"data": ()}, "prepare"),
        ({"data_weights": (1.0, 2.0)}, "each of 1 data sets"),
        ({"dtype": "float16"}, "allowed: bfloat16, float32"),
        ({"decay_share": 2.0}, "0 … 1"),
        ({"max_length": 2}, "max_length is 2; allowed: ≥ 3"),
    ],
)
def test_refuses_settings(base, changes, message):
    with pytest.raises(ValueError, match=message):
        replace(settings(base, "x", "medusa"), **changes)
