"""Every usual mistake, planted into a copy of a shipped head, is named; the shipped heads pass."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import aquiline
from aquiline.check.diagnosis import Diagnosis, diagnose
from aquiline.check.forced import Answer, capture, forced_chains
from aquiline.check.readings import Reading, as_stored, usual_mistakes
from aquiline.check.template import behind_prompts
from aquiline.checkpoints.open import SHIPPED, open_head, stored_eagle
from aquiline.engine.text import encode_prompt
from aquiline.loading import Loaded
from tests.prompts import PROMPTS

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("both_cores"), pytest.mark.timeout(900)]

EAGLE3 = SHIPPED / "smollm2-eagle3"
NAMES = (*range(31), "final")
Tensors = dict[str, Tensor]
Config = dict[str, Any]


@pytest.fixture(scope="module")
def loaded(smollm2_folder: object) -> Loaded:
    return aquiline.load("smollm2", None, dtype="float32", max_rows=12)


def answers_to(loaded: Loaded, prompts: list[str], tokens: int) -> list[Answer]:
    outputs = loaded.generate(prompts, max_new_tokens=tokens, temperature=0)
    texts = [(o.prompt_tokens + o.token_ids, len(o.prompt_tokens)) for o in outputs]
    return [capture(loaded.target, text, length, NAMES) for text, length in texts]


@pytest.fixture(scope="module")
def answers(loaded: Loaded) -> list[Answer]:
    return answers_to(loaded, PROMPTS[:12], 16)


@pytest.fixture(scope="module")
def more_answers(loaded: Loaded) -> list[Answer]:
    return answers_to(loaded, PROMPTS[:28], 24)


def planted(folder: Path, plant: Callable[[Config, Tensors], None]) -> Path:
    """A copy of the shipped EAGLE-3 head with a mistake."""
    shutil.copytree(EAGLE3, folder)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    plant(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def layers(step: int) -> Callable[[Config, Tensors], None]:
    def plant(config: Config, tensors: Tensors) -> None:
        config["eagle_aux_hidden_state_layer_ids"] = [2 + step, 15 + step, 27 + step]

    return plant


def flag(name: str, value: Any) -> Callable[[Config, Tensors], None]:
    return lambda config, tensors: config.update({name: value})


def rope(config: Config, tensors: Tensors) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 500.0


def reversed_features(config: Config, tensors: Tensors) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [27, 15, 2]


def repeats(config: Config, tensors: Tensors) -> None:
    """A head that learned labels without a shift: it reads the token that it is given off the last feature."""
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        tensors[name] = torch.zeros_like(tensors[name])
    fc = tensors["fc.weight"]
    tensors["fc.weight"] = torch.zeros_like(fc)
    tensors["fc.weight"][:, -fc.shape[0] :] = torch.eye(fc.shape[0]).to(fc.dtype)


def as_pairs(config: Config, tensors: Tensors) -> None:
    for part, heads in (("q_proj", 9), ("k_proj", 3)):
        name = f"midlayer.self_attn.{part}.weight"
        weight = tensors[name]
        tensors[name] = weight.view(heads, 2, 32, -1).transpose(1, 2).reshape(weight.shape)


def absolute(config: Config, tensors: Tensors) -> None:
    """Ids that are stored as they are, of a vocabulary that leaves room for them to be taken for offsets."""
    ids = tensors.pop("d2t") + torch.arange(8192)
    del tensors["t2d"]
    kept = ids < 40_000
    tensors["lm_head.weight"], tensors["d2t"] = tensors["lm_head.weight"][kept], ids[kept]
    config["draft_vocab_size"] = int(kept.sum())


def one_more_token(config: Config, tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] + 1
    tensors["t2d"] = tensors["t2d"].roll(1)


def wrong_embedding(config: Config, tensors: Tensors) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors["embed_tokens.weight"] = torch.randn(49152, 576, generator=generator).to(torch.bfloat16) * 0.1


def another_tokenizer(config: Config, tensors: Tensors) -> None:
    """The common tokens' ids are another tokenizer's: it lies in the folder, see the test."""
    ids = tensors.pop("d2t") + torch.arange(8192)
    del tensors["t2d"]
    moved, order = (49151 - ids).sort()
    tensors["d2t"], tensors["lm_head.weight"] = moved - torch.arange(8192), tensors["lm_head.weight"][order]


PLANTS: dict[str, tuple[Callable[[Config, Tensors], None], str]] = {
    "ids read as outputs": (layers(1), "features one layer lower (ids named as boundaries)"),
    "reversed": (reversed_features, "features in reverse order"),
    "labels without a shift": (repeats, "labels one token early (it repeats the token it is given)"),
    "absolute d2t": (absolute, "d2t as absolute ids"),
    "one more token": (one_more_token, "drafted ids one lower"),
    "norm before residual": (flag("norm_before_residual", True), "the residual is the feature itself"),
    "normed feedback": (flag("norm_output", True), "the feedback is not normed"),
    "pairs": (as_pairs, "q and k stored as pairs"),
    "embedding": (wrong_embedding, "the target's embedding"),
    "tokenizer": (another_tokenizer, "ids of the tokenizer in the head's folder"),
}


SMALL: dict[str, tuple[Callable[[Config, Tensors], None], str]] = {
    "ids read as boundaries": (layers(-1), "features one layer higher (ids named as outputs)"),
    "rope base": (rope, "rotary base 100000"),
}
"""Mistakes that cost a few drafts in a hundred, which takes more answers to tell from chance."""


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_mistake_is_named(
    loaded: Loaded, answers: list[Answer], smollm2_folder: Path, tmp_path: Path, plant: str
) -> None:
    change, expected = PLANTS[plant]
    base, readings = readings_of(loaded, mistaken(tmp_path / "head", plant, change, smollm2_folder))
    tried = [reading for reading in readings if reading.name == expected]
    assert name_of(diagnose(base, tried, answers, loaded.target)) == expected


@pytest.mark.verify
@pytest.mark.parametrize("plant", [*PLANTS, *SMALL])
def test_a_planted_mistake_is_named_among_all_readings(
    loaded: Loaded, more_answers: list[Answer], smollm2_folder: Path, tmp_path: Path, plant: str
) -> None:
    change, expected = (PLANTS | SMALL)[plant]
    base, readings = readings_of(loaded, mistaken(tmp_path / "head", plant, change, smollm2_folder))
    found = diagnose(base, readings, more_answers, loaded.target)
    assert len(found.compared) >= 10 and name_of(found) == expected, clear_names(found)


def mistaken(folder: Path, plant: str, change: Callable[[Config, Tensors], None], target: Path) -> Path:
    """The head with a mistake, and with the tokenizer that goes with it."""
    planted(folder, change)
    if plant == "tokenizer":
        shutil.copy(target / "tokenizer.json", folder)
        turn_ids(folder / "tokenizer.json")
    return folder


def name_of(found: Diagnosis) -> str | None:
    return None if found.named is None else found.named.reading.name


def clear_names(found: Diagnosis) -> list[tuple[str, float]]:
    return [(each.reading.name, each.chance) for each in found.compared if each.clear]


def turn_ids(file: Path) -> None:
    """Counts the ids of a tokenizer backwards."""
    document = json.loads(file.read_text())
    document["model"]["vocab"] = {token: 49151 - number for token, number in document["model"]["vocab"].items()}
    for added in document["added_tokens"]:
        added["id"] = 49151 - added["id"]
    file.write_text(json.dumps(document))


def readings_of(loaded: Loaded, folder: Path) -> tuple[Reading, list[Reading]]:
    head = open_head(folder, loaded.target.shape)
    stored = stored_eagle(head)
    return as_stored(stored), usual_mistakes(stored, loaded.target, head.path, loaded.target_path, 100_000.0)


@pytest.mark.parametrize("name", ["smollm2-eagle3", pytest.param("smollm2-eagle", marks=pytest.mark.verify)])
def test_shipped_heads_are_not_accused(loaded: Loaded, answers: list[Answer], name: str) -> None:
    base, readings = readings_of(loaded, SHIPPED / name)
    found = diagnose(base, readings, answers, loaded.target)
    assert found.named is None and len(found.compared) >= 10
    assert found.accepted > 0.4


TEMPLATES = {
    "no system prompt": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "contents alone": "{% for m in messages %}{{ m.content }}\n{% endfor %}",
    "[INST]": "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}",
}


@pytest.mark.parametrize(
    "name", ["no system prompt", *(pytest.param(n, marks=pytest.mark.verify) for n in ("contents alone", "[INST]"))]
)
def test_a_head_is_told_from_its_template(loaded: Loaded, name: str) -> None:
    """The head's template is the one of its training, or the target's is."""
    base = as_stored(stored_eagle(open_head(EAGLE3, loaded.target.shape)))
    other = copy.copy(loaded.tokenizer)
    other.chat_template = TEMPLATES[name]
    found = []
    for target, own in ((other, loaded.tokenizer), (loaded.tokenizer, other)):
        prompts = [encode_prompt(target, text) for text in PROMPTS[:12]]
        outputs = loaded.generate(prompts, max_new_tokens=16, temperature=0, ignore_eos=True)
        texts = [(o.prompt_tokens + o.token_ids, len(o.prompt_tokens)) for o in outputs]
        said = [capture(loaded.target, text, length, NAMES) for text, length in texts]
        forced = forced_chains(base, said, loaded.target, 2)
        renewed = {number: encode_prompt(own, text) for number, text in enumerate(PROMPTS[:12])}
        found.append(behind_prompts(renewed, base, said, forced, loaded.target))
    assert [each.clear for each in found] == [True, False], found
