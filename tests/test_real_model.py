"""SmolLM2 with the heads that the package ships: the words are those of plain decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest

import aquiline
from aquiline import Chain, DynamicTree, StaticTree
from aquiline.checkpoints.open import shipped_for
from aquiline.drafters.adaptive import Adaptive
from aquiline.drafters.trees import TreePolicy
from aquiline.engine.drafting import make_drafter
from aquiline.engine.request import GenerationOutput
from aquiline.loading import Loaded
from aquiline.targets.native import NativeDecoder
from tests.conftest import runs_kernels
from tests.prompts import PROMPTS

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("both_cores")]


@pytest.fixture(scope="module")
def loaded(smollm2_folder: object) -> Loaded:
    return aquiline.load("smollm2", dtype="float32")


def test_load_takes_the_shipped_head_and_the_kernels(loaded: Loaded) -> None:
    assert shipped_for(loaded.target_path)[0].name == "smollm2-eagle3"
    assert loaded.draft_name == "smollm2-eagle3 (eagle3) + prompt lookup"
    assert isinstance(loaded.drafter, Adaptive)
    assert isinstance(loaded.target, NativeDecoder) == runs_kernels()


def test_forty_prompts_in_float32(loaded: Loaded) -> None:
    plain = loaded.plain().generate(PROMPTS, max_new_tokens=64)
    ours = aquiline.load("smollm2", dtype="float32", adaptive=False).generate(PROMPTS, max_new_tokens=64)
    assert len(PROMPTS) == 40
    different = [p for p, a, b in zip(PROMPTS, plain, ours, strict=True) if a.token_ids != b.token_ids]
    assert different == []
    steps, accepted = sum(o.stats.steps for o in ours), sum(o.stats.accepted for o in ours)
    assert accepted / steps > 0.3, "the head must draft usefully, or it is wired wrongly"


@pytest.mark.parametrize("draft", ["smollm2-eagle", "prompt-lookup"])
def test_other_drafters_in_float32(loaded: Loaded, draft: str) -> None:
    prompts = PROMPTS[:8]
    plain = loaded.plain().generate(prompts, max_new_tokens=48)
    ours = aquiline.load("smollm2", draft, dtype="float32", adaptive=False).generate(prompts, max_new_tokens=48)
    assert [o.token_ids for o in ours] == [o.token_ids for o in plain]
    assert sum(o.stats.accepted for o in ours) > 0


def test_seeded_sampling_in_float32(loaded: Loaded) -> None:
    prompts = PROMPTS[8:12]
    settings = {"max_new_tokens": 32, "temperature": 0.8, "top_p": 0.95, "seed": 1}
    plain = loaded.plain().generate(prompts, **settings)
    ours = aquiline.load("smollm2", dtype="float32", adaptive=False).generate(prompts, **settings)
    assert [o.token_ids for o in ours] == [o.token_ids for o in plain]


METHODS: dict[str, tuple[str, TreePolicy | None]] = {
    "auto": ("auto", None),
    "eagle3 chain": ("smollm2-eagle3", Chain(4)),
    "eagle3 dynamic": ("smollm2-eagle3", DynamicTree(16, 4, 4)),
    "eagle3 static": ("smollm2-eagle3", StaticTree()),
    "eagle dynamic": ("smollm2-eagle", DynamicTree(12, 3, 3)),
    "eagle static": ("smollm2-eagle", StaticTree()),
    "medusa": ("smollm2-medusa", None),
    "hydra": ("smollm2-hydra", None),
    "lookup": ("prompt-lookup", None),
    "lookahead": ("lookahead", None),
}


@pytest.fixture(scope="module")
def plain_bfloat16(smollm2_folder: object) -> Loaded:
    if not runs_kernels():
        pytest.skip("only the native kernels keep the bits")
    return aquiline.load("smollm2", None, dtype="bfloat16", exact=True)


@pytest.fixture(scope="module")
def plain_outputs(plain_bfloat16: Loaded) -> list[GenerationOutput]:
    return plain_bfloat16.generate(PROMPTS[12:18], max_new_tokens=48, logprobs=0)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_in_bfloat16_has_plain_decodings_bits(
    plain_bfloat16: Loaded, plain_outputs: list[GenerationOutput], method: str
) -> None:
    """Branching trees and batches, too: the same tokens, and the same bits of their log-probabilities."""
    loaded = plain_bfloat16
    drafter = make_drafter(*METHODS[method], loaded.target, loaded.target_path).drafter
    engine = replace(loaded.engine, drafter=drafter, max_rows=3)
    ours = replace(loaded, engine=engine).generate(PROMPTS[12:18], max_new_tokens=48, logprobs=0)
    assert [o.token_ids for o in ours] == [o.token_ids for o in plain_outputs]
    assert [o.logprobs for o in ours] == [o.logprobs for o in plain_outputs]
    assert sum(o.stats.accepted for o in ours) > 0
