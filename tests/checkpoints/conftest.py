from pathlib import Path

import pytest

from tests.checkpoints.head_fixtures import V


@pytest.fixture
def target_gguf(tmp_path: Path) -> Path:
    """A GGUF file with nothing but a tokenizer."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "target.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(V)])
    writer.add_token_types([1] * V)
    writer.add_token_merges(["t 0", "t 1"])
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
