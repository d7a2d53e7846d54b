"""Builds every method by its name on a tiny target, and compares its output with plain decoding."""

from pathlib import Path

import pytest
import torch

from aquiline.bench.measure import Case, measure
from aquiline.bench.methods import HEAD_OF, METHODS, Bed, Method, find_head, make_method, parse_method
from aquiline.checkpoints.eagle.safeailab import write_head
from aquiline.checkpoints.parallel import write_parallel_heads
from aquiline.drafters.trees import DynamicTree
from aquiline.drafters.tuned import TunedChoice, write_tuned
from tests import tiny
from tests.drafters.overfit import heads

LABELS = (
    "auto",
    "prompt-lookup",
    "lookahead:window=3:ngram=3:guesses=2",
    "small-model",
    "small-model:chain:2,0.1:sampled=1",
    "medusa",
    "medusa:chain:2",
    "hydra",
    "eagle",
    "eagle:chain:3",
    "eagle2",
    "eagle2:dynamic:8,3,3",
    "auto:chain",
    "prompt-lookup:chain:4",
    "medusa:static",
    "hydra:chain",
    "eagle3",
    "eagle3:static",
    "eagle3+lookup",
    "eagle3+lookup:dynamic",
)


@pytest.fixture(scope="module", name="bed")
def _bed(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    folder = tmp_path_factory.mktemp("heads")
    for kind in ("eagle", "eagle3"):
        write_head(folder / kind, tiny.head(kind), torch.float64)
    for kind in ("medusa", "hydra"):
        write_parallel_heads(folder / kind / "head", heads(kind), torch.float64)  # as a training leaves it
    tiny.hf_model("llama").save_pretrained(folder / "small-model")
    kinds = dict.fromkeys(HEAD_OF.values())
    return Bed(tiny.decoder("llama"), None, (), None, "tiny", {kind: str(folder / kind) for kind in kinds})


def test_every_method_is_tried() -> None:
    assert {parse_method(label).name for label in LABELS} == METHODS.keys() - {"plain", "hf"}


@pytest.mark.parametrize("label", LABELS)
def test_a_method_emits_plain_decodings_tokens(bed: Bed, label: str) -> None:
    case = Case("qa", ("1",), 0, ((3, 14, 15, 3, 14, 15, 3, 14),), 0.0, 16)
    method = make_method(parse_method(label), bed)
    plain, mine = (measure(bed, m, case) for m in (Method("plain", None, ""), method))
    assert mine.outputs == plain.outputs and mine.method == label
    assert mine.nodes > 0 or label in ("auto", "prompt-lookup")
    assert method.settings
    assert method.chain == (
        "chain" in label or label in ("eagle3", "small-model", "prompt-lookup") or "sampled" in label
    )
    assert bool(mine.calibration) == (mine.nodes > 0 and not label.startswith(("look", "eagle3+")))


def test_a_head_of_the_wrong_kind(bed: Bed) -> None:
    wrong = Bed(bed.target, None, (), None, "tiny", {"eagle": bed.heads["eagle3"], "medusa": bed.heads["hydra"]})
    for method in ("eagle", "medusa"):
        with pytest.raises(ValueError, match=f"method {method} needs a head of kind '{method}', and .* is "):
            make_method(parse_method(method), wrong)


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ("eagle3:depth=3", "depth is not a setting of eagle3; allowed: a tree, as in eagle3:chain:4"),
        ("eagle3:bush:3", "'bush:3' is neither a tree nor a file; allowed: chain"),
        ("eagle3:chain:0", "chain depth is 0"),
        ("medusa:dynamic", "allowed for medusa: chain or static"),
        ("small-model:chain:2:depth=3", "depth is not a setting of small-model; allowed: sampled"),
        ("medusa:chain:9", "the tree is 9 deep; allowed: depth ≤ 3"),
        ("prompt-lookup:static", "tree is static; allowed for prompt-lookup: chain"),
        ("prompt-lookup:chain:3:max_ngram=3", "a tree and settings; allowed for prompt-lookup: one"),
        ("lookahead:chain:3", "tree is chain:3; allowed for lookahead: no tree"),
        ("eagle3:", "'eagle3:' has an empty part.*leave the colon out"),
    ],
)
def test_rejected_trees_and_settings(bed: Bed, label: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_method(parse_method(label), bed)


def test_shipped_heads_are_taken_by_their_kind(bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aquiline.bench import methods

    monkeypatch.setattr(methods, "shipped_for", lambda target: [Path(bed.heads[kind]) for kind in ("eagle3", "medusa")])
    shipped = Bed(bed.target, None, (), tmp_path, "mine", {})
    assert find_head("eagle3", shipped).path == Path(bed.heads["eagle3"])
    assert find_head("medusa", shipped).kind == "medusa"
    with pytest.raises(ValueError, match="aquiline train DATA --method hydra --target mine"):
        find_head("hydra", shipped)


def test_a_tuned_file_after_the_colon(bed: Bed, tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    write_tuned(file, TunedChoice("the fastest", "another-head", DynamicTree), {})
    method = make_method(parse_method(f"eagle3:{file}"), bed)
    assert (method.settings, method.head) == ("dynamic:32,5,8", bed.heads["eagle3"])
    write_tuned(file, TunedChoice("plain", None, None), {})
    method = make_method(parse_method(f"eagle3+lookup:{file}"), bed)
    assert (method.drafter, method.settings, method.chain) == (None, "plain (tuned: plain)", False)
