"""Runs OpenVINO GenAI on prompts given as token ids; runs in OpenVINO's environment.

    python engine_openvino.py JOB.json FILE_NUMBER

JOB: {"target", "head" or null, "k", "limit", "end", "prompts": [[ids]]}, models as OpenVINO folders.
Writes a line for each prompt to the open file: {"prompts", "outputs", "versions"}, and with drafts
{"drafts", "accepted", "counters"}.

OpenVINO counts drafted and accepted tokens of a whole answer ("counters"); how many each chain accepted is one less
than the tokens that its step hands to the streamer. It shortens the chains at the end of the budget, so it gets a
budget that is longer by a chain, and only chains that begin within `limit` are counted.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any


def chains(sizes: list[int], limit: int) -> list[int]:
    """Accepted drafts of each chain that begins before `limit` tokens are out; the first step is the prompt's."""
    begins = list(accumulate(sizes))
    return [size - 1 for begin, size in zip(begins, sizes[1:], strict=False) if begin < limit]


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
    draft = {"draft_model": genai.draft_model(job["head"], "CPU", **settings)} if job["head"] else {}
    pipeline = genai.LLMPipeline(job["target"], "CPU", **draft, **settings)
    config = pipeline.get_generation_config()
    config.do_sample = False
    config.stop_token_ids = set(job["end"])
    config.max_new_tokens = job["limit"]
    if job["head"]:
        config.num_assistant_tokens = job["k"]
        config.max_new_tokens += job["k"] + 1
    versions = {"openvino": openvino.__version__, "openvino_genai": genai.__version__}
    with os.fdopen(int(sys.argv[2]), "a") as out:
        for ids in job["prompts"]:
            streamer = Steps()
            result = pipeline.generate(openvino.Tensor(numpy.array([ids], dtype=numpy.int64)), config, streamer)
            outputs = [[int(token) for token in result.tokens[0]][: job["limit"]]]
            piece: dict[str, Any] = {"prompts": [ids], "outputs": outputs, "versions": versions}
            if job["head"]:
                accepted = chains(streamer.sizes, job["limit"])
                said = result.extended_perf_metrics
                piece["drafts"] = len(accepted)
                piece["accepted"] = [sum(count > i for count in accepted) for i in range(job["k"])]
                piece["counters"] = {
                    "drafted": int(said.get_num_draft_tokens()),
                    "accepted": int(said.get_num_accepted_tokens()),
                    "generated": int(said.get_num_generated_tokens()),
                    "steps": len(streamer.sizes),
                }
            out.write(json.dumps(piece) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
