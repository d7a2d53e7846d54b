"""The reference of transformers: the same tokens as plain decoding, and a clock that adds up."""

from pathlib import Path

import pytest
import torch

from aquiline.bench.hf_generate import load_hf, run_hf
from aquiline.bench.measure import Case, measure
from aquiline.bench.methods import Bed, Method, make_method, parse_method
from tests import tiny

PROMPTS = ((3, 14, 15, 92, 65), (35, 89, 79))


@pytest.fixture(scope="module", name="bed")
def _bed(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    folder = tmp_path_factory.mktemp("target")
    tiny.hf_model("llama").save_pretrained(folder)
    return Bed(tiny.decoder("llama"), None, (), folder, "tiny", {})


@pytest.mark.parametrize("rows", [1, 2])
def test_the_same_tokens_as_plain_decoding(bed: Bed, rows: int) -> None:
    case = Case("qa", ("1", "2")[:rows], 0, PROMPTS[:rows], 0.0, 20)
    hf = make_method(parse_method("hf"), bed)
    plain, record = measure(bed, Method("plain", None, ""), case), measure(bed, hf, case)
    assert record.outputs == plain.outputs and record.finish_reasons == ["length"] * rows
    assert (record.batch, record.steps, record.method) == (rows, 0, "hf")
    for row, first in zip(record.gaps, record.first_token_seconds, strict=True):
        assert len(row) == 19 and all(n == 1 for _, n in row)
        assert 0 < first + sum(s for s, _ in row) <= record.seconds
    # A row ends with its end token; the padding after it is not output.
    end = record.outputs[0][5]
    ended = measure(Bed(bed.target, None, (end,), bed.path, "tiny", {}), hf, case)
    at = record.outputs[0].index(end)
    assert ended.outputs[0] == record.outputs[0][: at + 1] and ended.finish_reasons[0] == "eos"


def test_sampling_is_seeded_and_nothing_comes_from_the_folder(bed: Bed, tmp_path: Path) -> None:
    model = tiny.hf_model("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 9.0, "do_sample": true, "top_k": 1}')
    loaded = load_hf(tmp_path, torch.float64, torch.device("cpu"))

    def outputs(temperature: float, seed: int) -> list[list[int]]:
        return run_hf(loaded, PROMPTS[:1], max_new_tokens=20, temperature=temperature, seed=seed, end_ids=()).outputs

    greedy = measure(bed, Method("plain", None, ""), Case("qa", ("1",), 0, PROMPTS[:1], 0.0, 20)).outputs
    assert outputs(0.0, 1) == greedy
    assert outputs(1.0, 1) == outputs(1.0, 1) != outputs(1.0, 2)
