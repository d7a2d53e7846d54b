"""Runs vLLM on prompts given as token ids; runs in vLLM's environment, knows nothing of ours.

    python engine_vllm.py JOB.json FILE_NUMBER

JOB: {"target", "head" or null, "method", "k", "limit", "rows", "end", "prompts": [[ids]]}.
Writes a line for every `rows` prompts to the open file: {"prompts", "outputs", "versions"}, and with drafts
{"drafts", "accepted"}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def counters(llm: Any, k: int) -> list[int]:
    """Chains so far, and those that accepted at least 1, 2, … k drafts."""
    drafts, accepted = 0, [0] * k
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            drafts += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            accepted = [a + b for a, b in zip(accepted, metric.values, strict=True)]
    return [int(drafts), *map(int, accepted)]


def main() -> None:
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    job = json.loads(Path(sys.argv[1]).read_text())
    speculative = None
    if job["head"]:
        speculative = {"model": job["head"], "method": job["method"], "num_speculative_tokens": job["k"]}
    llm = LLM(
        model=job["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=job["rows"],
        enable_prefix_caching=False,
        async_scheduling=False,
        disable_log_stats=False,
        speculative_config=speculative,
    )
    params = SamplingParams(temperature=0, max_tokens=job["limit"], stop_token_ids=job["end"])
    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    before = [0] * (job["k"] + 1)
    with os.fdopen(int(sys.argv[2]), "a") as out:
        for at in range(0, len(job["prompts"]), job["rows"]):
            prompts = job["prompts"][at : at + job["rows"]]
            results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            outputs = [list(result.outputs[0].token_ids) for result in results]
            piece: dict[str, Any] = {"prompts": prompts, "outputs": outputs, "versions": versions}
            if job["head"]:
                now = counters(llm, job["k"])
                piece["drafts"], *piece["accepted"] = (a - b for a, b in zip(now, before, strict=True))
                before = now
            out.write(json.dumps(piece) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
