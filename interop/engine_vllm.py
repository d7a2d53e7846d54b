"""Runs vLLM on prompts given as token ids; runs in vLLM's environment, knows nothing of ours.

    python engine_vllm.py JOB.json OUT.json

JOB: {"target", "head" or null, "method", "k", "limit", "rows", "end", "prompts": [[ids]]}.
OUT: {"outputs", "drafts", "accepted", "versions"}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


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
    results = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], params, use_tqdm=False)
    drafts, accepted = 0, [0] * job["k"]
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            drafts += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            for i, count in enumerate(metric.values):
                accepted[i] += count
    out = {
        "outputs": [list(result.outputs[0].token_ids) for result in results],
        "drafts": int(drafts),
        "accepted": [int(count) for count in accepted],
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
    }
    Path(sys.argv[2]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
