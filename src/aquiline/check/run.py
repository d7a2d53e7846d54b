"""The check of a head: acceptance, forecast, diagnosis, and the findings that decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from aquiline.bench.measure import Case, measure
from aquiline.bench.methods import Bed, Method
from aquiline.bench.recorder import Recorder
from aquiline.bench.records import Record
from aquiline.bench.runner import encode_turns, open_bed
from aquiline.bench.settings import BenchSettings
from aquiline.bench.tasks import load_questions, spread
from aquiline.check.card import promises
from aquiline.check.diagnosis import LEAST, Diagnosis, diagnose
from aquiline.check.findings import acceptance_findings, other_findings, reading_findings, template_findings
from aquiline.check.forced import Answer, Forced, Ints, capture, forced_chains
from aquiline.check.forecast import LONGEST, StepCosts, forecast, measure_costs, resampled
from aquiline.check.intervals import alphas, sign_test
from aquiline.check.readings import as_stored, features_of, usual_mistakes
from aquiline.check.report import CheckReport, Steps
from aquiline.check.settings import CheckSettings
from aquiline.check.template import OtherTemplate, behind_prompts, other_template
from aquiline.checkpoints.open import Head, open_head, stored_eagle
from aquiline.drafters.drafter import Drafter
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.eagle_network import DraftHead, HeadConfig, build_network
from aquiline.drafters.trees import Chain
from aquiline.engine.drafting import make_drafter
from aquiline.engine.generate import stream_requests
from aquiline.engine.request import Engine, Request
from aquiline.engine.text import common_prefix
from aquiline.models.files import read_json
from aquiline.sampling import SamplingParams
from aquiline.targets.native import NativeDecoder
from aquiline.targets.target import eagle3_layers
from aquiline.training.learners.target_parts import draft_layer
from aquiline.training.settings import TrainSettings

JUDGED = 20
"""Depths at which the engine judged fewer drafts are forecast with the last α that rests on as many."""

TIMED = 3
"""Prompts on which single levels of a drafter are timed."""

Advance = Callable[[str, int, int], None]
"""Progress: what is done, how much of it, and of how much."""


@dataclass(frozen=True, eq=False)
class EngineRun:
    """The engine's chains on the answers.

    Attributes:
        records: one for each answer.
        accepted: per answer, accepted drafts of each step.
        offered: per answer, judged drafts of each step.
        forced: accepted and judged drafts of teacher-forced chains below the same tokens, no longer than the engine's.
        parted: answers that differ from plain decoding's.
    """

    records: Sequence[Record]
    accepted: Sequence[Ints]
    offered: Sequence[Ints]
    forced: tuple[Sequence[Ints], Sequence[Ints]]
    parted: int


def check(settings: CheckSettings, bed: Bed | None = None, advance: Advance = lambda *_: None) -> CheckReport:
    """Checks a head, or forecasts a speed from assumed acceptance.

    Args:
        settings: the check; needs a head or `alpha`.
        bed: a loaded target; None loads the one that the settings name.
        advance: told about the progress.

    Raises:
        ValueError: neither a head nor an acceptance, a head that does not fit or is no EAGLE head, chains that are
            too long for the engine, or no prompt that fits the context.
    """
    if settings.head is None and not settings.alpha:
        raise ValueError("nothing to check; give a head, --alpha to forecast without one, or --lossless")
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    chain = Chain(settings.depth)  # a length that no engine drafts is an error before anything is measured
    bed = bed or open_bed(BenchSettings(target=settings.target, dtype=settings.dtype, device=settings.device))
    cases = prompt_cases(settings, bed)
    if settings.head is None:
        return _assumed(settings, bed, cases, chain)
    head = open_head(settings.head, bed.target.shape)
    template, stored = other_template(head.path, bed.tokenizer), stored_eagle(head)
    base = as_stored(stored)
    others = usual_mistakes(stored, bed.target, head.path, bed.path, _theta(bed.path))
    outputs = plain_outputs(bed, cases, advance)
    answers = []
    for number, (case, output) in enumerate(zip(cases, outputs, strict=True)):
        text = [*case.prompts[0], *output]
        answers.append(capture(bed.target, text, len(case.prompts[0]), features_of([base, *others])))
        advance("features", number + 1, len(cases))
    forced = forced_chains(base, answers, bed.target, settings.depth)
    run = _run_engine(chain, bed, head, cases, answers, forced, advance)
    diagnosis = None
    if sum(answer.starts > 0 for answer in answers) >= LEAST:
        diagnosis = diagnose(base, others, answers, bed.target, lambda n: advance("readings", n, len(others)))
    prompts = None if template is None else _reprompted(settings, bed, template, cases)
    other = None if prompts is None else behind_prompts(prompts, base, answers, forced, bed.target)
    costs = measure_costs(bed, lambda chain: _drafter(head, bed, chain), cases[:TIMED], run.records)
    return _report(settings, bed, head, forced, run, costs, diagnosis, other)


def _reprompted(settings: CheckSettings, bed: Bed, template: str, cases: Sequence[Case]) -> dict[int, Sequence[int]]:
    """Index of a case → its prompt under another chat template; none if the template fails."""
    tokenizer = copy(bed.tokenizer)
    tokenizer.chat_template = template
    try:
        again = prompt_cases(settings, replace(bed, tokenizer=tokenizer))
    except ValueError:
        return {}
    prompts = {case.key: case.prompts[0] for case in again}
    return {number: prompts[case.key] for number, case in enumerate(cases) if case.key in prompts}


def prompt_cases(settings: CheckSettings, bed: Bed) -> list[Case]:
    """First turns as token ids, spread evenly over the prompts; those over the context are left out.

    Raises:
        ValueError: none fits.
    """
    found = []
    for question in load_questions(settings.prompts):
        prompt = tuple(encode_turns(bed, question.turns[:1], ()))
        if len(prompt) + settings.max_new_tokens <= bed.target.shape.max_positions:
            found.append(Case(question.task, (question.id,), 0, (prompt,), 0.0, settings.max_new_tokens))
    if not found:
        raise ValueError(
            f"no prompt leaves room for {settings.max_new_tokens} tokens in the context of "
            f"{bed.target.shape.max_positions}; give shorter prompts"
        )
    return spread(found, settings.num_prompts)


def plain_outputs(bed: Bed, cases: Sequence[Case], advance: Advance) -> list[list[int]]:
    """Plain decoding's greedy answers."""
    engine = Engine(bed.target, None, None, bed.end_ids)
    requests = [
        Request(list(case.prompts[0]), SamplingParams(max_new_tokens=case.max_new_tokens, temperature=0.0))
        for case in cases
    ]
    outputs: dict[int, list[int]] = {}
    for event in stream_requests(engine, requests):
        if event.output is not None:
            outputs[event.index] = event.output.token_ids
            advance("answers", len(outputs), len(cases))
    return [outputs[i] for i in range(len(cases))]


def _theta(folder: Path | None) -> float | None:
    """Rotary base of the target in a folder, where its config.json names one."""
    if folder is None:
        return None
    config = read_json(folder / "config.json")
    theta = (config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta"))
    return float(theta) if isinstance(theta, int | float) else None


def _drafter(head: Head, bed: Bed, chain: Chain) -> Drafter:
    drafter = make_drafter(head, chain, bed.target, None).drafter
    assert drafter is not None
    return drafter


def _run_engine(
    chain: Chain, bed: Bed, head: Head, cases: Sequence[Case], answers: Sequence[Answer],
    forced: Sequence[Forced], advance: Advance,
) -> EngineRun:  # fmt: skip
    drafter = _drafter(head, bed, chain)
    records, columns, parted = [], list[tuple[Ints, ...]](), 0
    for number, (case, answer, chains) in enumerate(zip(cases, answers, forced, strict=True)):
        recorder = Recorder(drafter)
        record = measure(bed, Method("engine", recorder, "", chain=True), case)
        text = answer.tokens.tolist()
        same = common_prefix(record.outputs[0], text[answer.prompt_length :])
        parted += same < len(text) - answer.prompt_length
        columns.append(engine_chains(recorder, text, answer.prompt_length, same, chains))
        records.append(record)
        advance("engine", number + 1, len(cases))
    accepted, offered, forced_accepted, forced_offered = (list(column) for column in zip(*columns, strict=True))
    return EngineRun(records, accepted, offered, (forced_accepted, forced_offered), parted)


def engine_chains(
    recorder: Recorder, text: Sequence[int], prompt_length: int, same: int, forced: Forced
) -> tuple[Ints, Ints, Ints, Ints]:
    """Compares the chains of one answer's steps with teacher-forced ones below the same tokens.

    Args:
        recorder: of the engine's run.
        text: prompt and plain decoding's answer.
        prompt_length: tokens of the prompt.
        same: tokens of the answer that the engine emitted, too; steps after them are left out.
        forced: chains at every start.

    Returns:
        Accepted and judged drafts of each step: the engine's, and the teacher-forced ones.
    """
    rows = []
    start = 0
    for step in recorder.steps:
        if start >= min(same, forced.drafts.shape[1]):
            break
        size = int(step.tree.num_nodes[step.index]) - 1
        truth = list(text[prompt_length + 1 + start :][:size])
        mine = common_prefix(step.tree.tokens[step.index, 1 : 1 + size].tolist(), truth)
        theirs = common_prefix(forced.drafts[:size, start].tolist(), truth)
        rows.append([mine, min(mine + 1, len(truth)), theirs, min(theirs + 1, len(truth))])
        start += len(step.emitted)
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]


def _report(
    settings: CheckSettings, bed: Bed, head: Head, forced: Sequence[Forced], run: EngineRun, costs: StepCosts,
    diagnosis: Diagnosis | None, other: OtherTemplate | None,
) -> CheckReport:  # fmt: skip
    mine, theirs = np.concatenate(run.accepted), np.concatenate(run.forced[0])
    fewer, more = int((mine < theirs).sum()), int((mine > theirs).sum())
    steps = Steps(len(mine), fewer, more, sign_test(fewer, more))
    engine = alphas(run.accepted, run.offered)
    forced_alphas = alphas([f.accepted for f in forced], [f.offered for f in forced])
    promised = promises(head.path)
    tokens = sum(record.tokens - 1 for record in run.records)
    seconds = sum(record.seconds - record.first_token_seconds[0] for record in run.records)
    known = max(1, sum(rate.count >= JUDGED for rate in engine))
    values = [rate.value for rate in engine[:known]]
    samples = [sample[:known] for sample in resampled(run.accepted, run.offered)]
    findings = [
        *reading_findings(diagnosis),
        *acceptance_findings(forced_alphas, steps, promised),
        *template_findings(other),
        *other_findings(head, bed, run.parted, len(run.records)),
    ]
    return CheckReport(
        head=head.path.name,
        target=bed.name,
        answers=len(run.records),
        forced=forced_alphas,
        same=alphas(*run.forced),
        engine=engine,
        promises=promised,
        steps=steps,
        speed=(tokens / seconds, settings.depth) if tokens else None,
        forecasts=forecast(values, costs, samples) if values else (),
        diagnosis=diagnosis,
        findings=findings,
    )


def _assumed(settings: CheckSettings, bed: Bed, cases: Sequence[Case], chain: Chain) -> CheckReport:
    """Forecasts from assumed acceptance, with the costs of an untrained EAGLE-3 head of the usual sizes."""
    if len(settings.alpha) > LONGEST:
        raise ValueError(f"alpha has {len(settings.alpha)} shares; allowed: at most {LONGEST}, the longest forecast")
    head, half = _untrained(bed), bed.target.dtype == torch.bfloat16

    def make(chain: Chain) -> Drafter:
        return EagleDrafter(head, bed.target, chain, packed=True, form="int8" if half else None)

    timed = cases[:TIMED]
    long = [measure(bed, Method("long", make(chain), ""), case) for case in timed]
    forecasts = forecast(settings.alpha, measure_costs(bed, make, timed, long))
    return CheckReport(None, bed.name, 0, (), (), (), (), None, None, forecasts, None, ())


def _untrained(bed: Bed) -> DraftHead:
    shape, target = bed.target.shape, bed.target
    layer = target.config.layer if isinstance(target, NativeDecoder) else draft_layer(target)
    size = TrainSettings("", ("",), "", "eagle3").vocabulary_size(shape.vocab_size)
    config = HeadConfig("eagle3", layer, shape.vocab_size, size, shape.hidden_size, eagle3_layers(shape.num_layers))
    torch.manual_seed(0)
    network = build_network(config).to(target.dtype).eval().requires_grad_(False)
    return DraftHead(network, None if size == shape.vocab_size else torch.arange(size))
