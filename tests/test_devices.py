"""Everything that runs on a GPU, on a pretended one: equal to plain decoding on the CPU, with few waits.

A tensor left on the wrong device, a CPU generator or float64 is an error of the pretended device.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

import aquiline
from aquiline import decode
from aquiline.checkpoints.eagle.safeailab import write_head
from aquiline.checkpoints.parallel import build_parallel_network, write_parallel_heads
from aquiline.drafters.drafter import Drafter
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.lookahead import Lookahead
from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.mixed import Merged
from aquiline.drafters.parallel import ParallelHeads
from aquiline.drafters.parallel_network import ParallelConfig
from aquiline.drafters.small_model import SmallModel
from aquiline.drafters.trees import Chain, DynamicTree, StaticTree
from aquiline.engine.grammar import regex
from aquiline.loading import Loaded
from aquiline.sampling import LossyRule, SamplingParams
from aquiline.stats import GenerationStats
from aquiline.targets.decoder import Decoder
from aquiline.targets.static import StaticDecoder
from aquiline.targets.target import Target
from tests import tiny
from tests.knowing_drafter import KnowingDrafter, known_from
from tests.pretend_device import DEVICE, Away, pretended_device, pretended_graphs
from tests.targets import hf_models
from tests.tiny_tokenizers import byte_level

PROMPTS = tiny.prompts(3, seed=3, longest=9)
GREEDY = SamplingParams(max_new_tokens=7)
SAMPLING = SamplingParams(max_new_tokens=7, temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=5)
PROCESSED = replace(
    SAMPLING,
    repetition_penalty=1.2,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={3: 1.0},
    min_new_tokens=3,
    logprobs=2,
    logits_processors=(lambda ids, scores: scores.index_fill(1, ids[0, :1], 0.0),),
)
TARGETS = ("llama", "qwen3", "olmo2")
"""Two that our decoder computes, one that transformers does."""

NAMED = {
    "plain": (None, None),
    "auto": ("auto", None),
    "prompt lookup": ("prompt-lookup", None),
    "lookahead": ("lookahead", None),
    "EAGLE-1 static": ("eagle", StaticTree()),
    "EAGLE-1 chain": ("eagle", "chain:3"),
    "EAGLE-3 chain": ("eagle3", "chain:4,0.001"),
    "EAGLE-3 dynamic": ("eagle3", "dynamic:12,4,3"),
    "EAGLE-3 default": ("eagle3", None),
    "Medusa": ("medusa", None),
    "Hydra": ("hydra", None),
    "small model": ("llama", "chain:4"),
}
"""A draft and a tree, as users name them."""


def _made(name: str, target: Target, device: torch.device) -> Drafter:
    """Drafters that a user makes as objects, with heads and models as they were read: on the CPU."""
    head = tiny.head("eagle3", dtype=torch.float32)
    if name == "merged":
        return Merged(EagleDrafter(head, target, Chain(4)), PromptLookup())
    if name == "sampled chain":
        return EagleDrafter(head, target, Chain(3), sampled=True)
    if name == "sampled tree":
        return EagleDrafter(tiny.head("eagle", dtype=torch.float32), target, StaticTree(), sampled=True)
    model = tiny.decoder("llama", torch.float32)
    return SmallModel(copy.deepcopy(model).to(device), target, Chain(3), sampled=True)


MADE = ("merged", "sampled chain", "sampled tree", "sampled small model")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets and heads as a user has them: in folders."""
    base = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen3"):
        tiny.hf_model(family, torch.float32).save_pretrained(base / family)
    hf_models.build("olmo2").save_pretrained(base / "olmo2")
    for kind in ("eagle", "eagle3"):
        write_head(base / kind, tiny.head(kind, dtype=torch.float32), torch.float32)
    for kind in ("medusa", "hydra"):
        network = build_parallel_network(ParallelConfig(kind, 3, 48, tiny.VOCAB, 49))
        write_parallel_heads(base / kind, ParallelHeads(network, torch.arange(0, tiny.VOCAB, 2)), torch.float32)
    return base


def load(folders: Path, target: str, device: Any = "cpu", draft: Any = None, **settings: Any) -> Loaded:
    named = folders / draft if isinstance(draft, str) and (folders / draft).is_dir() else draft
    return aquiline.load(
        folders / target,
        named,
        tokenizer=byte_level(),
        dtype="float32",
        device=device,
        packed=device != "cpu",
        **settings,
    )


def ids(outputs: Any) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMED)
def test_what_a_user_names_equals_plain_decoding_on_the_cpu(folders: Path, target: str, name: str) -> None:
    draft, tree = NAMED[name]
    plain = load(folders, target)
    with pretended_device() as counts:
        away = load(folders, target, "pretended", draft, tree=tree)
        assert away.target.device == DEVICE
        for params in (GREEDY, SAMPLING):
            assert ids(away.generate(PROMPTS[:1], params)) == ids(plain.generate(PROMPTS[:1], params))
        outputs = away.generate(PROMPTS, PROCESSED)
    assert counts.kernels, "nothing ran on the device"
    expected = plain.generate(PROMPTS, PROCESSED)
    assert ids(outputs) == ids(expected)
    for output, other in zip(outputs, expected, strict=True):
        assert output.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MADE)
def test_drafters_made_by_hand_move_to_the_device(folders: Path, target: str, name: str) -> None:
    here = load(folders, target)
    here = load(folders, target, draft=_made(name, here.target, torch.device("cpu")))
    with pretended_device():
        away = load(folders, target, "pretended")
        away = load(folders, target, "pretended", _made(name, away.target, DEVICE))
        for params in (GREEDY, SAMPLING):
            for prompts in (PROMPTS[:1], PROMPTS):
                assert ids(away.generate(prompts, params)) == ids(here.generate(prompts, params))


def test_chats_grammars_and_lossy_rules(folders: Path) -> None:
    settings: dict[str, Any] = {"draft": "eagle3", "tree": "chain:3"}
    here = load(folders, "llama", **settings)
    answers = [session.send("abc", GREEDY) for session in [here.chat()] for _ in range(2)]
    grammar = regex(here.engine, "(ab|ba){3,9}c")
    constrained = replace(SAMPLING, logits_processors=(grammar,))
    written = here.generate(PROMPTS, constrained)
    rules = [LossyRule("threshold", 0.5, 0.5), LossyRule("typical")]
    relaxed = [load(folders, "llama", lossy=rule, **settings).generate(PROMPTS, SAMPLING) for rule in rules]
    with pretended_device():
        away = load(folders, "llama", "pretended", **settings)
        assert ids(session.send("abc", GREEDY) for session in [away.chat()] for _ in range(2)) == ids(answers)
        assert ids(away.generate(PROMPTS, constrained)) == ids(written)
        for rule, expected in zip(rules, relaxed, strict=True):
            away = load(folders, "llama", "pretended", lossy=rule, **settings)
            assert ids(away.generate(PROMPTS, SAMPLING)) == ids(expected)


def test_mixing_devices_is_an_error_with_its_place(folders: Path) -> None:
    with pretended_device():
        away = load(folders, "llama", "pretended")
        with pytest.raises(RuntimeError, match=r"targets/layers.py:\d+: .*mixes"):
            away.target.decoder.layers[0].input_layernorm(torch.ones(1, 48))  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="float64"):
            Away(torch.ones(2)).double()
        with pytest.raises(RuntimeError, match="CPU generator"):
            torch.multinomial(Away(torch.ones(2)), 1, generator=torch.Generator())


TREE = DynamicTree(num_nodes=32, depth=5, top_k=4)
STEPS: dict[str, tuple[Callable[[Target], Drafter | None], tuple[int, int]]] = {
    "plain": (lambda target: None, (1, 1)),
    "chain": (lambda target: EagleDrafter(tiny.head("eagle3", dtype=torch.float32), target, Chain(5, 0.001)), (3, 4)),
    "dynamic": (lambda target: EagleDrafter(tiny.head("eagle3", dtype=torch.float32), target, TREE), (2, 4)),
    "static": (lambda target: EagleDrafter(tiny.head("eagle", dtype=torch.float32), target, StaticTree()), (2, 4)),
    "lookahead": (lambda target: Lookahead(4, 3, 4), (2, 3)),
    "small model": (lambda target: SmallModel(away_target(), target, Chain(4, 0.001)), (3, 4)),
}
"""Drafter → copies to the host and to the device in a step, at most."""


def away_target() -> Decoder:
    """The tiny Llama on the pretended device."""
    return copy.deepcopy(tiny.decoder("llama", torch.float32)).to(DEVICE)


KERNELS = {
    "plain": ((151, 169), (151, 169)),
    "chain": ((390, 498), (500, 780)),
    "dynamic": ((492, 538), (605, 815)),
    "static": ((449, 500), (545, 770)),
    "lookahead": ((190, 190), (190, 190)),
    "small model": ((840, 900), (915, 1115)),
}
"""Drafter → kernels of a step of 1 and of 3 rows, at most: greedy; sampling, where each drawn token adds `DRAW`."""

DRAW = 24

LEVELS = {"chain": 5, "dynamic": 5, "static": 5, "small model": 4}
"""Drafter → levels that it couples with the noise of the target's draws."""


def counted_steps(
    rows: int,
    make: Callable[[Target], Drafter | None],
    params: SamplingParams = GREEDY,
    form: Callable[[Decoder], Target] = lambda decoder: decoder,
) -> list[tuple[int, int, int, int, Counter[str]]]:
    """Runs steps after one that fills what is made once.

    Returns:
        per step: copies to the host, to the device, kernels, emitted tokens, kernels by line.
    """
    found = []
    with torch.inference_mode(), pretended_device() as counts:
        target = form(away_target())
        drafter = make(target)
        state = decode.new_state(target, drafter, rows, 128)
        for slot, prompt in enumerate(tiny.prompts(rows, seed=3)):
            occupant = decode.Occupant(list(prompt), tiny.chooser(prompt, params), GenerationStats())
            list(decode.prefill(target, drafter, state, slot, occupant))
        for _ in range(5):
            counts.clear()
            results = decode.step(target, drafter, state, list(range(rows)))
            totals = (c.total() for c in (counts.to_host, counts.to_device, counts.kernels))
            found.append((*totals, sum(len(result.tokens) for result in results), Counter(counts.kernels)))
    return found[1:]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_waits_for_the_device_as_rarely_as_it_can(name: str, rows: int) -> None:
    make, (to_host, to_device) = STEPS[name]
    steps = counted_steps(rows, make)
    assert max(step[0] for step in steps) == to_host
    assert max(step[1] for step in steps) <= to_device
    assert max(step[2] for step in steps) <= KERNELS[name][0][rows == 3]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", STEPS)
def test_a_sampling_step_waits_once_more_for_each_token(name: str, rows: int) -> None:
    """Its draws need the noise of their tokens on the device: a copy for each, and one for each coupled level."""
    make, (to_host, to_device) = STEPS[name]
    for step in counted_steps(rows, make, SAMPLING):
        assert step[0] <= to_host - 1 + step[3]
        assert step[1] <= to_device + LEVELS.get(name, 0) + step[3]
        assert step[2] <= KERNELS[name][1][rows == 3] + DRAW * step[3]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_replayed_forward_leaves_few_kernels_beside_its_graph(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def replayed(decoder: Decoder) -> Target:
        target = StaticDecoder(decoder)
        target.graphs = True
        return target

    with pretended_graphs(monkeypatch) as graphs:
        steps = counted_steps(rows, STEPS["plain"][0], form=replayed)
    assert len(graphs) == 1, "captured in the step that is left out"
    for to_host, to_device, _, _, lines in steps:
        assert (to_host, to_device) == (1, 2)
        of_target = {line: count for line, count in lines.items() if line.startswith("targets/")}
        assert all(line.startswith("targets/static.py") for line in of_target), of_target
        assert sum(of_target.values()) - max(of_target.values()) <= 3, "copies of tokens, positions and lengths"


def test_the_benchmark_of_gpus_runs_in_smoke_form() -> None:
    script = Path(__file__).parent.parent / "benchmarks" / "gpu.py"
    command = [sys.executable, str(script), "--device", "cpu", "--smoke"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    for name in ("plain", "forward, ms by width", "cycle", "trees", "batches", "training"):
        assert f"\n| {name} |" in result.stdout, result.stdout


def test_a_model_spread_over_devices_keeps_each_layer_s_keys_where_it_computes() -> None:
    expected = aquiline.load(hf_models.build("olmo2"), None).generate(PROMPTS, GREEDY)
    texts = [[*prompt, *output.token_ids] for prompt, output in zip(PROMPTS, expected, strict=True)]

    def moved(device: torch.device | str) -> Callable[..., tuple[Any, Any]]:
        return lambda module, args, kwargs: tree_map_only(torch.Tensor, lambda t: t.to(device), (args, kwargs))

    with pretended_device() as counts:
        spread = hf_models.build("olmo2")
        for layer in spread.model.layers[4:]:
            layer.to(DEVICE).register_forward_pre_hook(moved(DEVICE), with_kwargs=True)
        spread.model.norm.register_forward_pre_hook(moved("cpu"), with_kwargs=True)
        loaded = aquiline.load(spread, KnowingDrafter(known_from(texts), hf_models.VOCAB, error=0.3))
        outputs = loaded.generate(PROMPTS, GREEDY)
        assert loaded.target.new_cache(1, 8).parts[0].key_block.shape[0] == 3
        copied = [line for line in (*counts.to_host, *counts.to_device) if line.startswith("targets/hf_cache")]
    assert ids(outputs) == ids(expected) and any(output.stats.accepted for output in outputs)
    assert not copied, f"keys travel between devices: {copied}"
