"""Builds for other processors, as far as this one runs their instructions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aquiline.cache import commit
from aquiline.native.build import build
from aquiline.native.library import Library, find_library, open_library
from aquiline.native.packing import Memory
from aquiline.native.race import delays, race_of
from aquiline.native.stack import readout
from aquiline.sampling import SamplingParams
from aquiline.targets.decoder import Decoder
from aquiline.targets.native import native
from aquiline.targets.target import TargetInput
from tests.native.test_codes import random_codes
from tests.targets.native_targets import ancestors_of, assert_close, chain, fill, random_decoder

BUILDS = {
    "x86-64": (set(), "8-lane vectors"),
    "haswell": ({"avx2", "fma", "f16c", "bmi2"}, "8-lane vectors"),
    "skylake-avx512": ({"avx512f", "avx512bw", "avx512dq", "avx512vl"}, "AVX-512"),
    "cooperlake": ({"avx512_bf16", "avx512_vnni"}, "AVX-512 with bfloat16"),
    "sapphirerapids": ({"amx_bf16", "avx512_fp16"}, "AMX"),
}
"""-march → what it needs in /proc/cpuinfo, and how it describes itself."""


def processor() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}


@pytest.fixture(scope="module", params=BUILDS)
def library(request: pytest.FixtureRequest) -> Library:
    needed, name = BUILDS[request.param]
    if needed - processor():
        pytest.skip(f"this processor lacks {sorted(needed - processor())}")
    built = open_library(build((f"-march={request.param}",)))
    assert built.instructions == name
    return built


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [((6, 2), 64, 96, 130), ((3, 1), 36, 50, 33)])
def test_each_build_is_close_to_the_reference_and_exact_for_trees(
    library: Library, dtype: torch.dtype, shape: tuple[tuple[int, int], int, int, int]
) -> None:
    reference = random_decoder(*shape, dtype, windows=(None, 25, None), qk_norm=True, qkv_bias=True)
    copy = native(reference, library)
    assert copy is not None
    seen, depth = ancestors_of([-1, 0, 0, 1, 1, 2, 5, 6, 4, 0, 7])
    tokens, _ = chain([70, 9], len(depth))
    positions = torch.tensor([70, 9])[:, None] + depth
    cache = fill(copy, [70, 9])
    out = copy.forward(TargetInput(tokens, positions, seen.expand(2, -1, -1), cache, [0, 1], (1, "final")))
    if dtype == torch.float32:
        caches = fill(reference, [70, 9])
        assert_close(
            out, reference.forward(TargetInput(tokens, positions, seen.expand(2, -1, -1), caches, [0, 1], (1, "final")))
        )
    else:
        exact = Decoder(reference.config).requires_grad_(False)
        exact.load_state_dict(reference.state_dict())
        calls = (tokens, positions, seen.expand(2, -1, -1))
        truth = exact.forward(TargetInput(*calls, fill(exact, [70, 9]), [0, 1])).logits
        noise = (
            (reference.forward(TargetInput(*calls, fill(reference, [70, 9]), [0, 1])).logits - truth).square().mean()
        )
        assert (out.logits - truth).square().mean() <= noise
    for node in [0, 2, 5, 6, 7, 10]:
        alone = copy.forward(TargetInput(tokens[:1, node : node + 1], positions[:1, node : node + 1], None, cache, [0]))
        assert torch.equal(alone.logits[0, 0], out.logits[0, node])
        commit(cache, torch.tensor([[0]]), [0])


@pytest.mark.parametrize(("bits", "group"), [(8, 32), (8, 64), (4, 32)])
def test_integer_products_have_the_same_bits_in_every_build(library: Library, bits: int, group: int) -> None:
    """Sums of groups are exact integers; the rest is float32 in a fixed order."""
    codes = random_codes(70, 200, group, bits)
    x = torch.randn(40, 200, generator=torch.Generator().manual_seed(2))
    here = find_library()[0]
    assert here is not None
    found, expected = (readout(Memory(each), codes, torch.float32, inputs=200, wide=True) for each in (library, here))
    assert torch.equal(found(x), expected(x))
    assert torch.equal(found(x[:3]), expected(x)[:3])


def test_races_have_the_same_bits_in_every_build(library: Library) -> None:
    here = find_library()[0]
    assert here is not None
    logits = torch.randn(1001, generator=torch.Generator().manual_seed(0)) * 3
    for seed in range(20):
        race = race_of(SamplingParams(temperature=1.0, top_p=0.9), seed, 5, 1.3)
        assert torch.equal(delays(library, race, None, 1001), delays(here, race, None, 1001))
        assert library.draw(race, logits.data_ptr(), 1001) == here.draw(race, logits.data_ptr(), 1001)
