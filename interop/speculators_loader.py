"""speculators' own loader opens our export; its converter and ours write the same tensors.

python interop/speculators_loader.py HEAD --python SPECULATORS_PYTHON [--target smollm2]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import checked, head_identity, head_path, record
from pieces import HERE

from aquiline.checkpoints.export.layouts import export_head
from aquiline.checkpoints.open import open_head, stored_eagle
from aquiline.models.resolve import resolve_target
from aquiline.targets.loading import target_shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=head_path, help="folder, hub id or shipped head")
    parser.add_argument("--check", action="store_true", help="only check these arguments, before anything is installed")
    parser.add_argument("--python", required=True, help="interpreter of the environment with speculators")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--record", action="store_true", help="write the outcome into interop/results")
    args = checked(parser)
    folder = resolve_target(args.target)
    shape = target_shape(folder)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        export_head(args.head, "speculators", scratch / "ours", shape, target_name=str(folder))
        export_head(args.head, "vllm", scratch / "vllm", shape, target_name=str(folder))
        job = {"target": str(folder), "ours": str(scratch / "ours"), "vllm": str(scratch / "vllm")}
        job |= {"converted": str(scratch / "converted"), "loaded": str(scratch / "loaded.json")}
        (scratch / "job.json").write_text(json.dumps(job))
        done = subprocess.run(
            [args.python, str(HERE / "engine_speculators.py"), str(scratch / "job.json")], check=False
        )
        if done.returncode:
            sys.exit("speculators refused the export")
        opened = [open_head(scratch / name, shape) for name in ("ours", "converted")]
        print(*(head.report for head in opened), sep="\n")
        ours, theirs = map(stored_eagle, opened)
        loaded = json.loads((scratch / "loaded.json").read_text())
    differing = sorted(n for n, t in ours.tensors.items() if not t.equal(theirs.tensors[n]))
    same_map = ours.draft_to_target is None or ours.draft_to_target.equal(theirs.draft_to_target)
    outcome = {
        **head_identity(args.head),
        **loaded,
        "tensors": len(ours.tensors),
        "tensors_that_their_conversion_changes": differing,
        "same_vocabulary_map": same_map,
        "same_configuration": ours.config == theirs.config,
    }
    print(f"our export and speculators' conversion: {outcome}")
    if args.record:
        record(f"speculators-{args.head.resolve().name}", outcome)
    if differing or not same_map or ours.config != theirs.config:
        sys.exit("our export and speculators' conversion of the same head differ")


if __name__ == "__main__":
    main()
