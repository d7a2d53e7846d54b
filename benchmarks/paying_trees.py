"""Compares the default, which drafts what pays, with chains of 1 to 7 and dynamic trees of 6 to 32 nodes.

    python benchmarks/paying_trees.py --questions QUESTIONS --output benchmarks/results/paying-trees.json

All methods take turns on every prompt, and every tree stands behind prompt lookup as the default does. Outputs are
compared with plain decoding. Needs a quiet machine for its speeds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from aquiline.bench.environment import environment
from aquiline.bench.measure import Case, measure
from aquiline.bench.methods import Bed, Method, make_method, parse_method
from aquiline.bench.records import Record
from aquiline.bench.runner import encode_turns, open_bed
from aquiline.bench.settings import BenchSettings
from aquiline.bench.tasks import load_questions
from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.mixed import LookupFirst
from aquiline.engine.drafting import make_drafter
from aquiline.targets.cost import cost_curve

TREES = (
    *(f"chain:{depth}" for depth in range(1, 8)),
    "dynamic:6,3,3",
    "dynamic:8,4,4",
    "dynamic:12,4,4",
    "dynamic:16,5,4",
    "dynamic:32,5,8",
)


def fixed(bed: Bed, head: str, tree: str) -> Method:
    made = make_drafter(head, tree, bed.target, bed.path)
    assert made.drafter is not None
    return Method(tree, LookupFirst(PromptLookup(), made.drafter), tree)


def cases(bed: Bed, arguments: argparse.Namespace) -> list[Case]:
    found = []
    questions = load_questions(arguments.questions)
    for task in sorted({question.task for question in questions}):
        chosen = [question for question in questions if question.task == task]
        for question in chosen[arguments.skip : arguments.skip + arguments.per_task]:
            prompt = tuple(encode_turns(bed, question.turns[:1], ()))
            for temperature in arguments.temperatures:
                found.append(Case(task, (question.id,), 0, (prompt,), temperature, arguments.tokens))
    if not found:
        raise SystemExit(f"no task has more than {arguments.skip} questions; lower --skip")
    return found


def row(records: list[Record]) -> dict[str, Any]:
    steps = sum(record.steps for record in records)
    return {
        "tokens_per_second": sum(r.tokens for r in records) / sum(r.seconds - r.phases["prefill"] for r in records),
        "tau": 1 + sum(record.accepted for record in records) / steps,
        "nodes": sum(record.nodes for record in records) / steps,
    }


def table(records: dict[str, list[Record]], temperature: float) -> dict[str, dict[str, Any]]:
    """Per task and over all of them, each method's row."""
    tasks = sorted({record.task for found in records.values() for record in found})
    result: dict[str, dict[str, Any]] = {}
    for task in (*tasks, "all"):
        chosen = {
            label: [r for r in found if r.temperature == temperature and task in (r.task, "all")]
            for label, found in records.items()
        }
        result[task] = {label: row(found) for label, found in chosen.items() if found}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", default="smollm2-eagle3")
    parser.add_argument("--questions", nargs="*", default=[], help="folder or files; none: the embedded ones")
    parser.add_argument("--per-task", type=int, default=2)
    parser.add_argument("--skip", type=int, default=0, help="questions of each task to leave out")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--trees", nargs="+", default=TREES)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    bed = open_bed(BenchSettings(target=arguments.target))
    usual = make_drafter("auto", None, bed.target, bed.path)
    methods = [make_method(parse_method("plain"), bed), make_method(parse_method("auto"), bed)]
    methods.append(Method("without prices", usual.drafter, "the default's chain"))
    methods += [fixed(bed, arguments.head, tree) for tree in arguments.trees]
    found = cases(bed, arguments)
    records: dict[str, list[Record]] = {method.label: [] for method in methods}
    for method in methods:
        measure(bed, method, found[0])
    for number, case in enumerate(found):
        shift = number % len(methods)
        for method in methods[shift:] + methods[:shift]:
            records[method.label].append(measure(bed, method, case))
    same = {
        label: sum(a.outputs == b.outputs for a, b in zip(each, records["plain"], strict=True))
        for label, each in records.items()
    }
    tables = {str(temperature): table(records, temperature) for temperature in arguments.temperatures}
    for temperature, tasks in tables.items():
        for task, rows in tasks.items():
            print(f"T = {temperature}, {task}")
            for label, each in sorted(rows.items(), key=lambda item: -float(item[1]["tokens_per_second"])):
                speed, tau, nodes = each["tokens_per_second"], each["tau"], each["nodes"]
                print(f"  {label:16} {speed:6.1f} tokens/s, τ {tau:.2f}, {nodes:.2f} nodes")
    print(f"equal to plain decoding, of {len(found)}: {same}")
    if arguments.output:
        report = {
            "environment": environment(bed), "cost_curve": cost_curve(bed.target), "equal": same, "prompts": len(found),
            "tables": tables,
        }  # fmt: skip
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
