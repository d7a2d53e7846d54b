"""Every method by its name, on a tiny target: it builds, drafts, and says what plain decoding says."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aquiline.bench.measure import Case, measure
from aquiline.bench.methods import HEAD_OF, METHODS, Bed, Method, find_head, make_method, parse_method
from aquiline.checkpoints.eagle.safeailab import write_head
from aquiline.checkpoints.final_heads import write_final_heads
from tests import tiny
from tests.drafters.overfit import heads

LABELS = (
    "auto",
    "prompt-lookup",
    "lookahead:window=3:ngram=3:guesses=2",
    "small-model",
    "small-model:depth=2:min_prob=0.1:sampled=1",
    "medusa",
    "medusa:chain:depth=2",
    "hydra",
    "eagle",
    "eagle:chain:depth=3",
    "eagle2",
    "eagle2:dynamic:num_nodes=8:depth=3:top_k=3",
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
        write_final_heads(folder / kind / "head", heads(kind), torch.float64)  # as a training leaves it
    tiny.hf_model("llama").save_pretrained(folder / "small-model")
    kinds = dict.fromkeys(HEAD_OF.values())
    return Bed(tiny.decoder("llama"), None, (), None, "tiny", {kind: str(folder / kind) for kind in kinds})


def test_every_method_is_tried() -> None:
    assert {parse_method(label).name for label in LABELS} == METHODS.keys() - {"plain", "hf"}


@pytest.mark.parametrize("label", LABELS)
def test_a_method_says_what_plain_decoding_says(bed: Bed, label: str) -> None:
    case = Case("qa", ("1",), 0, ((3, 14, 15, 3, 14, 15, 3, 14),), 0.0, 16)
    method = make_method(parse_method(label), bed)
    plain, mine = (measure(bed, m, case) for m in (Method("plain", None, ""), method))
    assert mine.outputs == plain.outputs and mine.method == label
    assert mine.nodes > 0 or label in ("auto", "prompt-lookup")
    assert method.settings
    assert method.chain == (
        "chain" in label or label in ("eagle3", "small-model", "prompt-lookup") or "sampled" in label
    )
    assert bool(mine.calibration) == (mine.nodes > 0 and not label.startswith(("auto", "prompt", "look", "eagle3+")))


def test_a_head_of_another_kind_is_refused(bed: Bed) -> None:
    wrong = Bed(bed.target, None, (), None, "tiny", {"eagle": bed.heads["eagle3"], "medusa": bed.heads["hydra"]})
    for method in ("eagle", "medusa"):
        with pytest.raises(ValueError, match=f"method {method} needs a head of kind '{method}', and .* is "):
            make_method(parse_method(method), wrong)


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ("eagle3:depth=3", "settings need a tree; allowed: eagle3:chain, :static or :dynamic"),
        ("eagle3:chain:nodes=3", "unexpected keyword argument 'nodes'"),
        ("eagle3:chain:depth=0", "chain depth is 0"),
        ("medusa:dynamic", "chains and static trees"),
    ],
)
def test_settings_that_make_no_tree(bed: Bed, label: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_method(parse_method(label), bed)


def test_shipped_heads_are_found_by_the_fingerprint_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aquiline.bench import methods
    from aquiline.models import resolve as targets

    fingerprint: Callable[[Path], str] = lambda folder: f"print of {folder.name}"  # noqa: E731
    monkeypatch.setattr(targets, "target_fingerprint", fingerprint)
    monkeypatch.setattr(methods, "SHIPPED", tmp_path)
    for name, target in (("a-eagle3", "other"), ("b-eagle3", "mine"), ("c-medusa", "mine")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"aquiline_target_fingerprint": "print of {target}"}}')
    bed = Bed(tiny.decoder("llama"), None, (), Path("mine"), "mine", {})
    assert find_head("eagle3", bed) == tmp_path / "b-eagle3"
    assert find_head("medusa", bed) == tmp_path / "c-medusa"
    with pytest.raises(ValueError, match="aquiline train DATA --method hydra --target mine"):
        find_head("hydra", bed)
