"""lm-eval's `local-completions` against a running server, and the same task computed in this process.

    lm_eval_client.py URL MODEL TARGET PYTHON

The task is made here: which of two continuations is likelier. Without prompt log-probabilities (`echo` with
`logprobs`), lm-eval would score chance and say nothing. TARGET is the folder of the served model, PYTHON an interpreter
that has this package; with TARGET alone, this program prints what that interpreter computes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

QUESTIONS = [
    ("The capital of France is", [" Paris", " Tuesday"], 0),
    ("Two plus two equals", [" banana", " four"], 1),
    ("Water freezes when it is very", [" cold", " loud"], 0),
    ("The sun rises in the", [" east", " soup"], 0),
    ("At night people go to", [" thirteen", " bed"], 1),
    ("A cat says", [" meow", " algebra"], 0),
    ("We read a", [" swimming", " book"], 1),
    ("She drank a glass of", [" water", " window"], 0),
]

TASK = """\
task: likelier
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def in_process(target: str) -> tuple[float, list[list[float]]]:
    """Accuracy and the continuations' log-probabilities, by the engine itself, without a server."""
    from aquiline import load
    from aquiline.engine.logprobs import prompt_logprobs

    loaded = load(target, None, dtype="float32")
    scores = []
    for text, choices, _ in QUESTIONS:
        row = []
        for choice in choices:
            before, whole = (loaded.tokenizer(each)["input_ids"] for each in (text, text + choice))
            *_, found = prompt_logprobs(loaded.engine, whole, 0)
            assert found is not None
            row.append(sum(found[0][len(before) - 1 :]))
        scores.append(row)
    hits = [max(range(2), key=row.__getitem__) == label for row, (_, _, label) in zip(scores, QUESTIONS, strict=True)]
    return sum(hits) / len(hits), scores


def main(url: str, model: str, target: str, python: str) -> None:
    """Compares the two scores."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "likelier.jsonl"
        rows = [{"text": text, "choices": choices, "label": label} for text, choices, label in QUESTIONS]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (Path(folder) / "likelier.yaml").write_text(TASK.format(file=data))
        arguments = f"model={model},base_url={url}/v1/completions,tokenizer={target},num_concurrent=4,max_retries=1"
        found = lm_eval.simple_evaluate(
            model="local-completions",
            model_args=arguments,
            tasks=["likelier"],
            task_manager=TaskManager(include_path=folder),
            log_samples=True,
            bootstrap_iters=0,
        )
    theirs = found["results"]["likelier"]["acc,none"]
    served = [[float(each[0]) for each in sample["filtered_resps"]] for sample in found["samples"]["likelier"]]
    run = subprocess.run([python, __file__, target], capture_output=True, text=True, check=True)
    ours, scores = json.loads(run.stdout.splitlines()[-1])
    worst = max(abs(a - b) for row, other in zip(served, scores, strict=True) for a, b in zip(row, other, strict=True))
    assert theirs == ours and worst < 1e-3, (theirs, ours, worst)
    result = {"client": "lm-eval", "version": version("lm-eval"), "accuracy": theirs, "passed": True}
    print(json.dumps(result | {"largest_difference_of_a_log_probability": worst}))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(json.dumps(in_process(sys.argv[1])))
    else:
        main(*sys.argv[1:])
