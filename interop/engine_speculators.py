"""Opens an export with speculators' own loader; runs in speculators' environment.

    python engine_speculators.py JOB.json

JOB: {"target", "ours": our export, "vllm": the same head for vLLM, "converted": where to convert it to,
"loaded": where to write what the loader found}.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    import torch
    from safetensors.torch import load_file
    from speculators.convert.entrypoints import convert_model
    from speculators.models.eagle3 import Eagle3DraftModel

    job = json.loads(Path(sys.argv[1]).read_text())
    model = Eagle3DraftModel.from_pretrained(job["ours"])
    state, given = model.state_dict(), load_file(Path(job["ours"]) / "model.safetensors")
    missing = sorted(name for name in given if name not in state)
    differing = [n for n, t in given.items() if n in state and not torch.equal(state[n].cpu().to(t.dtype), t)]
    loaded = {"speculators": version("speculators"), "exported": len(given), "unknown": missing, "changed": differing}
    print(f"speculators' loader: {loaded}")
    Path(job["loaded"]).write_text(json.dumps(loaded))
    if missing or differing:
        raise SystemExit(f"unknown {missing[:5]}, differing {differing[:5]}")
    convert_model(job["vllm"], job["target"], "eagle3", output_path=job["converted"], validate_device="cpu")


if __name__ == "__main__":
    main()
