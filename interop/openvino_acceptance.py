"""Compares acceptance in OpenVINO GenAI with our own chain drafting, same prompts, same k, float32.

    python interop/openvino_acceptance.py HEAD --python OPENVINO_PYTHON [--k 4] [--limit 96] [--prompts 24]

AQUILINE_OPTIMUM_CLI names the converter. Converted models are kept under interop/.work, as are the results of each
prompt, so an interrupted run resumes.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from common import Task, agreements, checked, conclude, our_chains, parser, task_of
from pieces import WORK, collect, digest, engine, installed_version

from aquiline.checkpoints.eagle import safeailab
from aquiline.checkpoints.export import openvino
from aquiline.checkpoints.export.layouts import export_head
from aquiline.checkpoints.open import open_head, stored_eagle
from aquiline.models.cache_folder import build_once
from aquiline.models.resolve import target_fingerprint
from aquiline.targets.loading import target_shape


def converted_target(task: Task, optimum: str, form: str = "fp32") -> Path:
    """The target as an OpenVINO model with weights of some form, converted once."""
    stamp = {"target": target_fingerprint(task.target), "optimum-intel": optimum, "form": form}

    def build(folder: Path) -> None:
        print("converting the target", flush=True)
        command = [os.environ["AQUILINE_OPTIMUM_CLI"], "export", "openvino", "-m", str(task.target)]
        command += ["--task", "text-generation-with-past", "--weight-format", form, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"optimum-cli ended with {done.returncode}:\n{done.stderr[-4000:]}")

    return build_once(WORK / f"openvino-{task.target.name}-{form}-{stamp['target'][:8]}", stamp, build)


def converted_head(task: Task, optimum: str) -> Path:
    """The head as `aquiline export --to openvino` writes it, converted once."""
    config = stored_eagle(open_head(task.head, target_shape(task.target))).config
    code = digest(*(Path(module.__file__ or "") for module in (openvino, safeailab)))
    stamp = {"head": digest(task.head), "config": digest(config), "exporter": code, "optimum-intel": optimum}

    def build(folder: Path) -> None:
        print("converting the head", flush=True)
        print(export_head(task.head, "openvino", folder, target_shape(task.target), target_name=str(task.target)))

    return build_once(WORK / f"openvino-{task.head.name}-{digest(*stamp.values())}", stamp, build)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--python", required=True, help="interpreter of the environment with OpenVINO GenAI")
    args = checked(options)
    task = task_of(args)
    version, optimum = (installed_version(args.python, name) for name in ("openvino-genai", "optimum-intel"))
    target, head = converted_target(task, optimum), converted_head(task, optimum)
    job = {"k": task.k, "limit": task.limit, "end": task.end, "target": str(target), "head": str(head)}
    series = f"openvino-{version}"
    run = engine(args.python, "engine_openvino.py", job)
    name = f"{task.name(series)}-{head.name[-8:]}"
    theirs = collect(name, task.prompts, run, "OpenVINO with drafts")
    run = engine(args.python, "engine_openvino.py", {**job, "head": None})
    plain = collect(task.plain_name(f"{series}-plain"), task.prompts, run, "OpenVINO, plain")
    ours = our_chains(task)
    print(f"OpenVINO GenAI's own counters say {theirs['counters']}")
    more = {"counters": theirs["counters"], "versions": theirs["versions"] | {"optimum-intel": optimum}}
    conclude(task, "openvino", f"OpenVINO GenAI {version}", ours, theirs, agreements(ours, theirs, plain), **more)


if __name__ == "__main__":
    main()
