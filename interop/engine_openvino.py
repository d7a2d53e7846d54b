"""Runs OpenVINO GenAI on prompts given as token ids; runs in OpenVINO's environment.

    python engine_openvino.py JOB.json OUT.json

JOB: {"target", "head" or null, "k", "limit", "end", "prompts": [[ids]]}, models as OpenVINO folders.
OUT: {"outputs", "drafts", "accepted_total", "versions"}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    import numpy
    import openvino
    import openvino_genai as genai

    job = json.loads(Path(sys.argv[1]).read_text())
    settings = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    if job["head"]:
        draft = genai.draft_model(job["head"], "CPU", **settings)
        pipeline = genai.LLMPipeline(job["target"], "CPU", draft_model=draft, **settings)
    else:
        pipeline = genai.LLMPipeline(job["target"], "CPU", **settings)
    config = pipeline.get_generation_config()
    config.max_new_tokens = job["limit"]
    config.do_sample = False
    config.stop_token_ids = set(job["end"])
    if job["head"]:
        config.num_assistant_tokens = job["k"]
    outputs, drafts, accepted = [], 0, 0
    for ids in job["prompts"]:
        result = pipeline.generate(openvino.Tensor(numpy.array([ids], dtype=numpy.int64)), config)
        outputs.append([int(token) for token in result.tokens[0]])
        extended = getattr(result, "extended_perf_metrics", None)
        if job["head"] and extended is not None:
            accepted += int(extended.get_num_accepted_tokens())
            drafts += len(extended.main_model_metrics.raw_metrics.m_batch_sizes)
    out = {
        "outputs": outputs,
        "drafts": drafts,
        "accepted_total": accepted,
        "versions": {"openvino": openvino.__version__, "openvino_genai": genai.__version__},
    }
    Path(sys.argv[2]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
