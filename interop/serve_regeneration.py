"""Launches `aquiline serve --engine vllm`, asks it for answers, and has `aquiline prepare` regenerate through it.

    python interop/serve_regeneration.py [--draft smollm2-eagle3] [--records 32] [--max-new-tokens 64]

AQUILINE_VLLM names vLLM's program, VLLM_PRELOAD the libraries that its processes preload. At temperature 0 the
regenerated answers must be those of our own plain decoding, in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from common import checked, decode, encode_prompts, head_identity, head_path, load_target, read_prompts, record
from transformers import AutoTokenizer

from aquiline.models.resolve import resolve_target

AQUILINE = [sys.executable, "-m", "aquiline.cli"]


def wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path, seconds: float) -> float:
    """Waits for the server; returns the seconds that it took to come up."""
    begin = time.monotonic()
    while time.monotonic() < begin + seconds:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}:\n{log.read_text()[-6000:]}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return time.monotonic() - begin
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise SystemExit(f"the server did not come up within {seconds:g} s:\n{log.read_text()[-6000:]}")


def completion(url: str, model: str, prompt: str) -> str:
    """One answer through the server's chat API."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 32}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def draft_counts(url: str) -> dict[str, Any]:
    """Chains and accepted drafts that the server counted."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()

    def values(name: str) -> list[int]:
        return [int(float(v)) for v in re.findall(rf"^vllm:spec_decode_num_{name}_total{{[^}}]*}} (\S+)$", text, re.M)]

    return {"drafts": sum(values("drafts")), "accepted": values("accepted_tokens_per_pos")}


def regenerate(url: str, model: str, prompts: list[str], budget: int, scratch: Path) -> tuple[list[str], str]:
    """Answers through `aquiline prepare --regenerate`, in the order of the prompts, and its report."""
    source, output = scratch / "conversations.jsonl", scratch / "regenerated.jsonl"
    records = [[{"role": "user", "content": p}, {"role": "assistant", "content": "(to be replaced)"}] for p in prompts]
    source.write_text("".join(json.dumps({"messages": record}) + "\n" for record in records))
    command = [*AQUILINE, "prepare", str(source), "--output", str(output), "--regenerate", "--temperature", "0"]
    command += ["--endpoint", f"{url}/v1", "--model", model, "--max-new-tokens", str(budget), "--in-flight", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"prepare --regenerate ended with {done.returncode}:\n{done.stderr[-4000:]}")
    answers = {}
    for line in output.read_text().splitlines():
        messages = json.loads(line)["messages"]
        answers[messages[-2]["content"]] = messages[-1]["content"]
    return [answers[prompt] for prompt in prompts], done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=head_path, default="smollm2-eagle3", help="folder, hub id or shipped head")
    parser.add_argument("--check", action="store_true", help="only check these arguments, before anything is installed")
    parser.add_argument("--records", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--seconds", type=float, default=600, help="to wait for the server")
    parser.add_argument("--record", action="store_true", help="write the numbers into interop/results")
    args = checked(parser)
    url, model, prompts = f"http://127.0.0.1:{args.port}", "smollm2", read_prompts(args.records)
    command = [
        *AQUILINE,
        "serve",
        "--engine",
        "vllm",
        "--draft",
        str(args.draft),
        "--draft-tokens",
        str(args.draft_tokens),
    ]
    command += ["--", "--port", str(args.port), "--served-model-name", model, "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "1024", "--max-num-seqs", "8"]
    environment = {**os.environ, "LD_PRELOAD": os.environ.get("VLLM_PRELOAD", "")}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        log = scratch / "server.log"
        with log.open("w") as stream:
            server = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
        try:
            seconds = wait_until_healthy(url, server, log, args.seconds)
            print(
                f"the server is up after {seconds:.0f} s\nit says: {completion(url, model, prompts[0])!r}", flush=True
            )
            answers, report = regenerate(url, model, prompts, args.max_new_tokens, scratch)
            counts = draft_counts(url)
        finally:
            server.terminate()
            server.wait(60)
    print(report, f"chains and accepted drafts of the server: {counts}", sep="\n", flush=True)
    settings = {**head_identity(args.draft), "records": len(prompts)}
    settings |= {"max_new_tokens": args.max_new_tokens, "draft_tokens": args.draft_tokens, **counts}
    folder = resolve_target("smollm2")
    ids, end = encode_prompts(folder, prompts)
    target, tokenizer = load_target(folder), AutoTokenizer.from_pretrained(folder)
    plain = [decode(target, None, prompt, end, args.max_new_tokens)["outputs"][0] for prompt in ids]
    expected = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in plain]
    same = sum(a.strip() == b.strip() for a, b in zip(answers, expected, strict=True))
    print(f"Regenerated answers and our own plain decoding: {same} of {len(prompts)} equal.")
    if args.record:
        record("serve", {**settings, "answers_equal_to_our_plain_decoding": same})


if __name__ == "__main__":
    main()
