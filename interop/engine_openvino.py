"""Runs OpenVINO GenAI on prompts given as token ids; runs in OpenVINO's environment.

    python engine_openvino.py JOB.json OUT.json

JOB: {"target", "head" or null, "k", "limit", "end", "prompts": [[ids]]}, models as OpenVINO folders.
OUT: {"outputs", "drafts", "accepted", "counters", "versions"}. OpenVINO counts accepted drafts in all;
how many each chain accepted is seen from the tokens that a step hands to the streamer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    import numpy
    import openvino
    import openvino_genai as genai

    class Steps(genai.StreamerBase):
        """Notes how many tokens each step brings."""

        def __init__(self) -> None:
            super().__init__()
            self.sizes: list[int] = []

        def write(self, token: int | list[int]) -> genai.StreamingStatus:
            self.sizes.append(1 if isinstance(token, int) else len(token))
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

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
    outputs, sizes, counters = [], [], {"accepted": 0, "drafted": 0}
    for ids in job["prompts"]:
        streamer = Steps()
        result = pipeline.generate(openvino.Tensor(numpy.array([ids], dtype=numpy.int64)), config, streamer)
        outputs.append([int(token) for token in result.tokens[0]])
        sizes.append(streamer.sizes)
        extended = getattr(result, "extended_perf_metrics", None)
        if job["head"] and extended is not None:
            counters["accepted"] += int(extended.get_num_accepted_tokens())
            counters["drafted"] += int(extended.get_num_draft_tokens())
    accepted = [size - 1 for row in sizes for size in row[1:]]  # the first step is the prompt's
    out = {
        "outputs": outputs,
        "drafts": len(accepted),
        "accepted": [sum(count > i for count in accepted) for i in range(job["k"])],
        "sizes": sizes,
        "counters": counters,
        "versions": {"openvino": openvino.__version__, "openvino_genai": genai.__version__},
    }
    Path(sys.argv[2]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
