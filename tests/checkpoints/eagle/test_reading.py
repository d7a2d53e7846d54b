"""Each broken head is refused with one reason."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aquiline.checkpoints.open import open_head
from tests.checkpoints import head_fixtures as fixtures
from tests.checkpoints.head_fixtures import TARGET, VD, H, V


def _good(folder: Path) -> Path:
    config = fixtures.llama_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=VD, rope_theta=1e4)
    return fixtures.write(folder, config, fixtures.eagle3())


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def _config(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}, default=str))

    return apply


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["midlayer.mlp.up_proj.weight"][3, 4] = torch.nan


def _shift_d2t(index: int, by: int) -> Callable[[Path], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["d2t"][index] += by

    return _tensors(change)


def _other_t2d(tensors: dict[str, torch.Tensor]) -> None:
    tensors["t2d"][[1, 4]] = tensors["t2d"][[4, 1]]


def _truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 3000)


def _lost_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _cut_config(folder: Path) -> None:
    (folder / "config.json").write_text((folder / "config.json").read_text()[:50])


def _list_config(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")


def _lost_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


class _Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.makedirs, ("owned-by-a-pickle",))


def _pickle_with_code(folder: Path) -> None:
    _lost_weights(folder)
    with (folder / "pytorch_model.bin").open("wb") as stream:
        pickle.dump({"fc.weight": _Payload()}, stream)


def _zip_pickle_with_code(folder: Path) -> None:
    _lost_weights(folder)
    torch.save({"fc.weight": _Payload()}, folder / "pytorch_model.bin")


def _pickle_of_numbers(folder: Path) -> None:
    _lost_weights(folder)
    torch.save({"fc.weight": 3.0}, folder / "pytorch_model.bin")


def _pickle_of_a_list(folder: Path) -> None:
    _lost_weights(folder)
    torch.save([torch.zeros(1)], folder / "pytorch_model.bin")


def _cut_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    _lost_weights(folder)
    os.truncate(folder / "pytorch_model.bin", 3000)


def _link(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        outside = folder.parent / f"outside-{name}"
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)

    return apply


def _sharded(change: Callable[[Path, dict[str, str]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        _lost_weights(folder)
        fixtures.shard(folder, config, tensors)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        change(folder, index["weight_map"])
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return apply


def _index_leaves(folder: Path, weight_map: dict[str, str]) -> None:
    shard = folder / weight_map["fc.weight"]
    shard.rename(folder.parent / "stolen.safetensors")
    for name, file in weight_map.items():
        if file == shard.name:
            weight_map[name] = "../stolen.safetensors"


def _index_without_shard(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / weight_map["fc.weight"]).unlink()


def _index_names_more(folder: Path, weight_map: dict[str, str]) -> None:
    weight_map["fc.bias"] = weight_map["fc.weight"]


def _index_names_less(folder: Path, weight_map: dict[str, str]) -> None:
    del weight_map["norm.weight"]


def _index_with(name: str) -> Callable[[Path], None]:
    def change(folder: Path, weight_map: dict[str, str]) -> None:
        weight_map["fc.weight"] = name

    return _sharded(change)


def _link_to_itself(folder: Path) -> None:
    _lost_weights(folder)
    (folder / "model.safetensors").symlink_to("model.safetensors")


def _deep_config(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 200_000)


def _sparse_pickle(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    _lost_weights(folder)
    torch.save({**tensors, "fc.weight": tensors["fc.weight"].to_sparse()}, folder / "pytorch_model.bin")


def _index_is_empty(folder: Path, weight_map: dict[str, str]) -> None:
    weight_map["fc.weight"] = 3  # type: ignore[assignment]


Q = "midlayer.self_attn.q_proj.weight"
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing tensor": (
        _tensors(lambda t: t.pop("midlayer.hidden_norm.weight")),
        r"midlayer\.hidden_norm\.weight is miss",
    ),
    "extra tensor": (_tensors(lambda t: t.update(x=torch.zeros(1))), r"x is unexpected"),
    "wrong shape": (
        _tensors(lambda t: t.update({Q: torch.zeros(16, 16)})),
        r"q_proj\.weight has shape \(16, 16\).*16, 32",
    ),
    "features and fc": (_config(eagle_aux_hidden_state_layer_ids=[2, 5]), r"it reads 3 features, config\.json names 2"),
    "int weights": (_tensors(lambda t: t.update({Q: t[Q].to(torch.int8)})), r"q_proj\.weight has dtype torch\.int8"),
    "NaN": (_tensors(_nan), r"up_proj\.weight holds NaN"),
    "d2t out of range": (_shift_d2t(11, 1), r"d2t leads to target id 40, outside 0 … 39"),
    "d2t negative": (_shift_d2t(0, -2), r"d2t leads to target id -1, outside"),
    "d2t not sorted": (_shift_d2t(4, 5), r"d2t is not sorted: draft id 5 leads to target id 12 after 13"),
    "d2t twice the same": (_shift_d2t(4, -1), r"d2t is not sorted: draft id 4 leads to target id 7 after 7"),
    "d2t too short": (
        _tensors(lambda t: t.update(d2t=t["d2t"][:5].clone())),
        r"d2t has shape \(5,\), expected \(12,\)",
    ),
    "d2t of floats": (_tensors(lambda t: t.update(d2t=t["d2t"].float())), r"d2t has dtype torch\.float32"),
    "d2t and t2d disagree": (_tensors(_other_t2d), r"t2d and d2t disagree about 2 tokens"),
    "t2d counts others": (_tensors(lambda t: t["t2d"].__setitem__(0, True)), r"t2d marks 13 tokens, expected .* 12"),
    "t2d of another target": (
        _tensors(lambda t: t.update(t2d=torch.ones(9, dtype=torch.bool))),
        r"t2d has shape \(9,\)",
    ),
    "no map": (_tensors(lambda t: (t.pop("d2t"), t.pop("t2d"))), r"neither d2t nor t2d"),
    "map without need": (
        _tensors(lambda t: t.update({"lm_head.weight": torch.zeros(V, H)})),
        r"lm_head\.weight has shape \(40, 16\)",
    ),
    "embedding of another size": (
        _tensors(lambda t: t.update({"embed_tokens.weight": torch.zeros(9, H)})),
        r"embed_tokens\.weight has shape \(9, 16\), expected \(40, 16\)",
    ),
    "draft vocabulary too large": (
        _config(draft_vocab_size=99),
        r"lm_head\.weight has shape \(12, 16\), expected \(99",
    ),
    "no sizes": (_config(hidden_size=...), r"lacks 'hidden_size'"),
    "sizes of the wrong type": (
        _config(intermediate_size="24"),
        r"intermediate_size = '24', expected a positive number",
    ),
    "size zero": (_config(num_attention_heads=0), r"num_attention_heads = 0"),
    "kv heads that do not divide": (_config(num_key_value_heads=3), r"num_key_value_heads 3 must divide"),
    "wrong target width": (_config(target_hidden_size=32), r"hidden_size 32, this target has 16"),
    "wrong target vocabulary": (_config(vocab_size=50), r"vocab_size 50, this target has\s+40"),
    "layer beyond the target": (_config(eagle_aux_hidden_state_layer_ids=[2, 5, 11]), r"exceed the target's 10"),
    "layer twice": (_config(eagle_aux_hidden_state_layer_ids=[2, 2, 5]), r"expected a list of different layer numbers"),
    "no layers": (_config(eagle_aux_hidden_state_layer_ids=[]), r"layer_ids = \[\], expected a list of different"),
    "no layers inside": (
        _config(eagle_config={"eagle_aux_hidden_state_layer_ids": []}),
        r"layer_ids = \[\], expected a list of different",
    ),
    "no map and no draft vocabulary": (
        _config(draft_vocab_size=...),
        r'lm_head\.weight has shape \(12, 16\).*write "draft_vocab_size": 12',
    ),
    "architectures as a number": (_config(architectures=5), r"says architectures = 5, expected a list of names"),
    "architectures as text": (_config(architectures="Llama"), r"architectures = 'Llama', expected a list of names"),
    "a flag as text": (_config(norm_output="false"), r"norm_output = 'false', expected true or false"),
    "rope base as text": (_config(rope_theta="10000"), r"rope_theta = '10000', expected a number > 0"),
    "rope base inside": (
        _config(rope_parameters={"rope_theta": -1}),
        r"says rope_parameters\.rope_theta = -1, expected",
    ),
    "a size beyond all bounds": (_config(hidden_size=10**30), r"hidden_size = 10+, expected a positive number up to"),
    "layers without end": (_config(num_hidden_layers=10**9), r"num_hidden_layers = 10+, expected a number up to 128"),
    "heads wider than the stream": (_config(num_attention_heads=32), r"num_attention_heads 32 give heads of width 0"),
    "scaling without its factor": (_config(rope_scaling={"rope_type": "yarn"}), r"rope scaling 'yarn' lacks 'factor'"),
    "layers as text": (_config(eagle_aux_hidden_state_layer_ids="2"), r"expected a list of different layer numbers"),
    "two lists of layers": (
        _config(
            eagle_aux_hidden_state_layer_ids=[2, 5, 7], eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}
        ),
        r"\[2, 5, 7\] at the top level and \[1, 4, 6\] inside",
    ),
    "activation": (_config(hidden_act="relu"), r"hidden_act 'relu' is not supported"),
    "rope scaling": (_config(rope_scaling={"rope_type": "longrope"}), r"longrope"),
    "truncated": (_truncate, r"model\.safetensors is not whole"),
    "no config": (_lost_config, r"it has no config\.json"),
    "cut config": (_cut_config, r"config\.json is not valid JSON"),
    "config is a list": (_list_config, r"holds a list, expected an object"),
    "no weights": (_lost_weights, r"holds no weights: none of model\.safetensors"),
    "pickle with code": (_pickle_with_code, r"pytorch_model\.bin is refused: it is a pickle with code"),
    "zipped pickle with code": (_zip_pickle_with_code, r"pytorch_model\.bin is refused: it is a pickle with code"),
    "pickle of numbers": (_pickle_of_numbers, r"'fc\.weight' is a float, expected a tensor"),
    "pickle of a list": (_pickle_of_a_list, r"holds a list, expected a mapping"),
    "cut pickle": (_cut_pickle, r"pytorch_model\.bin is not whole"),
    "weights behind a link": (_link("model.safetensors"), r"model\.safetensors is a link that leaves the folder"),
    "config behind a link": (_link("config.json"), r"config\.json is a link that leaves the folder"),
    "index that leaves": (_sharded(_index_leaves), r"'\.\./stolen\.safetensors' leaves the folder"),
    "index without its shard": (_sharded(_index_without_shard), r"of-00002\.safetensors is not a file"),
    "index names more": (_sharded(_index_names_more), r"lacks fc\.bias, which model\.safetensors\.index\.json places"),
    "index names less": (_sharded(_index_names_less), r"holds norm\.weight, which .* does not place there"),
    "index without a name": (_index_with(""), r"the file name '' leaves the folder; expected a plain name"),
    "index of the folder above": (_index_with(".."), r"the file name '\.\.' leaves the folder"),
    "index with a zero byte": (_index_with("a\0b"), r"the file name 'a\\x00b' leaves the folder"),
    "index with half a letter": (_index_with("a\ud800"), r"the file name 'a\\ud800' leaves the folder"),
    "index with an endless name": (_index_with("a" * 5000), r"the file name 'a+' leaves the folder"),
    "weights that link to themselves": (_link_to_itself, r"model\.safetensors is a link that leads nowhere"),
    "config without a bottom": (_deep_config, r"config\.json is not valid JSON"),
    "a number for a matrix": (
        _tensors(lambda t: t.update({"fc.weight": torch.tensor(1.0)})),
        r"fc\.weight has shape \(\), expected \(16, 48\)",
    ),
    "d2t of truths": (_tensors(lambda t: t.update(d2t=t["d2t"].bool())), r"d2t has dtype torch\.bool"),
    "sparse weights": (_sparse_pickle, r"fc\.weight is stored as torch\.sparse_coo, expected a dense tensor"),
    "index of numbers": (_sharded(_index_is_empty), r"has no weight_map"),
}


def test_the_unbroken_one_reads(tmp_path: Path) -> None:
    assert open_head(_good(tmp_path / "head"), TARGET).report.config.draft_vocab_size == VD


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage, message = BROKEN[name]
    monkeypatch.chdir(tmp_path)
    folder = _good(tmp_path / "head")
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        open_head(folder, TARGET)
    assert str(folder) in str(caught.value)
    assert "weights_only" not in str(caught.value)  # torch's advice to run the code
    assert not (tmp_path / "owned-by-a-pickle").exists()


def _replaced(config: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Each key of a configuration, also of the objects in it, once with each value of another kind."""
    for key, value in config.items():
        for other in (5, -1, 1.5, True, "x", [], ["x"], {}, {"a": 1}, None, math.nan, 10**30):
            yield key, other, config | {key: other}
        if isinstance(value, dict):
            for inner, other, changed in _replaced(value):
                yield f"{key}.{inner}", other, config | {key: changed}


@pytest.mark.parametrize("make", [fixtures.modelopt_config, fixtures.speculators_config])
def test_a_value_of_any_kind_is_read_or_refused(make: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    """Never another exception than ValueError, and always with the folder's name."""
    folder, refused = fixtures.write(tmp_path / "head", make(), fixtures.eagle3("layers.0")), 0
    for key, value, config in _replaced(make()):
        (folder / "config.json").write_text(json.dumps(config))
        try:
            open_head(folder, TARGET)
        except ValueError as error:
            assert str(folder) in str(error), (key, value)
            refused += 1
    assert refused > 100


def test_a_reduced_vocabulary_in_an_eagle1_head(tmp_path: Path) -> None:
    config = fixtures.llama_config(bias=False, draft_vocab_size=VD)
    with pytest.raises(ValueError, match=r"draft_vocab_size = 12, but an EAGLE-1/2 head drafts all 40 tokens"):
        open_head(fixtures.write(tmp_path, config, fixtures.eagle1()), TARGET)
