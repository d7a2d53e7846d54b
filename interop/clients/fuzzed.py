"""Reads what schemathesis reported, in one run or several, and what the server counted: fuzzed.py REPORT URL"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from importlib.metadata import version
from pathlib import Path


def main(report: str, url: str) -> None:
    """Every case must have passed, and requests of both kinds must have reached the server."""
    runs = re.findall(r"(\d+) generated, (\d+) passed", Path(report).read_text())
    generated, passed = (sum(int(run[i]) for run in runs) for i in range(2))
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    refused = dict(re.findall(r'^aquiline:requests_refused_total{.*status="(\d+)"} (\d+)', text, re.M))
    finished = sum(int(count) for count in re.findall(r"^vllm:request_success_total{.*} (\d+)", text, re.M))
    running = float(re.findall(r"^vllm:num_requests_running{.*} (\S+)", text, re.M)[0])
    result = {"client": "schemathesis", "version": version("schemathesis"), "cases": generated, "outputs": finished}
    result |= {"refused": {status: int(count) for status, count in refused.items()}}
    result["passed"] = passed == generated > 0 and finished > 0 and running == 0 and all(s < "500" for s in refused)
    print(json.dumps(result))
    assert result["passed"], result


if __name__ == "__main__":
    main(*sys.argv[1:])
