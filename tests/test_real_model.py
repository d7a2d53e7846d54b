"""SmolLM2 with the heads that the package ships: the words are those of plain decoding."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

import aquiline
from aquiline.checkpoints.open import shipped_for
from aquiline.drafters.adaptive import Adaptive
from aquiline.loading import Loaded
from aquiline.targets.packed import PackedDecoder
from aquiline.targets.prepack import packable
from tests.prompts import PROMPTS

pytestmark = pytest.mark.real

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def both_cores() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def loaded(smollm2_folder: object) -> Loaded:
    return aquiline.load("smollm2", dtype="float32")


def test_load_takes_the_shipped_head_and_the_packed_path(loaded: Loaded) -> None:
    assert shipped_for(loaded.target_path)[0].name == "smollm2-eagle3"
    assert loaded.draft_name == "smollm2-eagle3 (eagle3) + prompt lookup"
    assert isinstance(loaded.drafter, Adaptive)
    if packable(torch.float32, CPU):
        assert isinstance(loaded.target, PackedDecoder)


def test_forty_prompts_in_float32(loaded: Loaded) -> None:
    plain = loaded.plain().generate(PROMPTS, max_new_tokens=128)
    ours = aquiline.load("smollm2", dtype="float32", adaptive=False).generate(PROMPTS, max_new_tokens=128)
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


def test_chains_in_bfloat16_are_bit_exact() -> None:
    if not packable(torch.bfloat16, CPU):
        pytest.skip("this processor has no fast bfloat16 kernels, so float32 is the default here")
    model = aquiline.load("smollm2", dtype="bfloat16", tree=aquiline.Chain(4))
    for prompt in PROMPTS[12:16]:
        settings = {"max_new_tokens": 64, "logprobs": 0}
        plain, ours = model.plain().generate(prompt, **settings), model.generate(prompt, **settings)
        assert ours.token_ids == plain.token_ids
        assert ours.logprobs == plain.logprobs, "not near: the same bits"
        assert ours.stats.accepted > 0


def test_trees_in_bfloat16_differ_at_near_ties_alone() -> None:
    if not packable(torch.bfloat16, CPU):
        pytest.skip("this processor has no fast bfloat16 kernels, so float32 is the default here")
    model = aquiline.load("smollm2", dtype="bfloat16", tree=aquiline.DynamicTree(8, 4, 3))
    for prompt in PROMPTS[16:20]:
        settings = {"max_new_tokens": 48, "logprobs": 2}
        plain, ours = model.plain().generate(prompt, **settings), model.generate(prompt, **settings)
        pairs = zip(plain.token_ids, ours.token_ids, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is not None:
            assert plain.top_logprobs is not None
            values = sorted(plain.top_logprobs[first].values(), reverse=True)
            # Two units in the last place of a bfloat16 logit between 16 and 32.
            assert values[0] - values[1] <= 2 * 2.0 ** (math.floor(math.log2(32)) - 8)
