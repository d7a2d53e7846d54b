"""Has speculators and ModelOpt write tiny heads, for tests of our readers; runs in their environment.

    interop/.venv-speculators/bin/python interop/write_fixtures.py tests/checkpoints/eagle/fixtures

The sizes are those of tests/checkpoints/head_fixtures.py.
"""

from __future__ import annotations

import sys
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

IDS = torch.tensor([1, 2, 3, 7, 8, 12, 17, 20, 21, 29, 33, 39])
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 128,
}
ROPE = {"rope_theta": 5000.0, "rope_type": "default"}


def write_modelopt(folder: Path) -> None:
    """ModelOpt's own conversion and export."""
    import modelopt.torch.speculative as mtsp
    from modelopt.torch.export import export_speculative_decoding
    from modelopt.torch.speculative.config import EAGLE3_DEFAULT_CFG

    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=10, rope_parameters=ROPE))
    config = deepcopy(EAGLE3_DEFAULT_CFG["config"])
    config["eagle_architecture_config"].update(SIZES, draft_vocab_size=len(IDS), _attn_implementation="eager")
    mtsp.convert(model, [("eagle", config)])
    model.eagle_module.d2t.copy_(IDS - torch.arange(len(IDS)))
    export_speculative_decoding(model, export_dir=folder)


def write_speculators(folder: Path) -> None:
    """speculators' own model, saved by itself."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    with tempfile.TemporaryDirectory() as target:
        LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=10, rope_parameters=ROPE)).save_pretrained(target)
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=LlamaConfig(**SIZES, num_hidden_layers=1, rope_parameters=ROPE),
            draft_vocab_size=len(IDS),
            norm_output=True,
            fc_norm=True,
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=target, architectures=["LlamaForCausalLM"]),
            ),
        )
        model = Eagle3DraftModel(config)
        member = torch.zeros(SIZES["vocab_size"], dtype=torch.bool)
        member[IDS] = True
        with torch.no_grad():
            for parameter in model.parameters():  # training would fill them; some are uninitialised here
                parameter.normal_(std=0.1)
        model.t2d.copy_(member)
        model.d2t.copy_(IDS - torch.arange(len(IDS)))
        model.save_pretrained(folder)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace(target, "some/target"))
    (folder / "config.py").unlink(missing_ok=True)  # its own source, which no reader needs


def main() -> None:
    root = Path(sys.argv[1])
    torch.manual_seed(0)
    write_modelopt(root / "modelopt")
    write_speculators(root / "speculators")


if __name__ == "__main__":
    main()
