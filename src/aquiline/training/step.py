"""Takes one optimiser step of a training run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from aquiline.training.features import add_features, conversation_key, features_ahead
from aquiline.training.learners.learner import Example, gradients, refresh
from aquiline.training.metrics import StepReport, divergence
from aquiline.training.optim import set_rate
from aquiline.training.run import Run
from aquiline.training.settings import EAGLE
from aquiline.training.stream import micro_batches

Place = tuple[int, int]
"""Place of a conversation: the number of its set, and its index there."""

Text = tuple[Tensor, Tensor]
"""Tokens (n,) int64 and mask (n,) bool of a conversation."""


class TrainingDiverged(RuntimeError):
    """The loss or the gradient is not finite; the last checkpoint is the last good state."""


def optimiser_step(run: Run) -> StepReport:
    """Takes the next batch, sums its gradients and moves the weights.

    Conversations are independent, so each worker thread computes whole micro-batches with one core: no barriers inside
    a step. Of a distributed run's n processes, each takes every n-th micro-batch of the same batch.

    Raises:
        TrainingDiverged: if the loss or the gradient is not finite.
    """
    settings, learner = run.settings, run.learner
    chosen = run.mixture.next_batch(settings.batch_positions)
    texts = {place: read_text(run, place) for place in chosen}
    masks = [texts[place][1] for place in chosen]
    lengths, counted = [len(mask) for mask in masks], learner.counts(masks)
    scales = [settings.step_decay**depth / max(1, count) for depth, count in enumerate(counted)]
    groups = micro_batches(lengths, settings.micro_positions, pack=learner.packs)
    mine = groups[run.accelerator.process_index :: run.accelerator.num_processes]
    parameters = list(learner.network.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    sums = _add_gradients(run, parameters, [[chosen[i] for i in group] for group in mine], texts, scales)
    sums = _reduce(run, parameters, sums)
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, settings.clip))
    _move(run, float(sums[2, 0]), norm)
    run.seen += sum(lengths)
    means = sums / torch.tensor(counted).clamp(min=1)
    return StepReport(float(sums[2, 0]), means[0].tolist(), means[1].tolist(), norm)


def _add_gradients(
    run: Run,
    parameters: Sequence[torch.nn.Parameter],
    groups: Sequence[Sequence[Place]],
    texts: Mapping[Place, Text],
    scales: Sequence[float],
) -> Tensor:
    """Adds the gradients of this process's micro-batches; returns (3, depths) sums: losses, hits, the loss itself."""
    example = example_of(run, {place: texts[place] for group in groups for place in group})
    for replica in run.replicas:
        refresh(replica, run.learner)
    run.free = list(run.replicas)

    def work(group: Sequence[Place]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        examples = [example(place) for place in group]
        replica = run.free.pop()
        result = gradients(replica, replica.batch(examples), scales)
        run.free.append(replica)
        return result

    sums = torch.zeros(3, run.learner.depths)
    # In the order of the groups, whoever finishes first: the sum is the same for any workers.
    for loss, losses, hits, grads in run.pool.map(work, groups):
        sums += torch.stack([losses.float().cpu(), hits.cpu(), torch.full_like(hits.cpu(), loss.item())])
        for parameter, grad in zip(parameters, grads, strict=True):
            assert parameter.grad is not None
            parameter.grad += grad
    return sums


def example_of(run: Run, texts: Mapping[Place, Text]) -> Callable[[Place], Example]:
    """Returns the function by which a worker adds features to one of this process's conversations."""
    ahead: dict[str, Tensor] = {}
    if run.sharded:
        tokens = {conversation_key(*place): text[0] for place, text in texts.items()}
        ahead = features_ahead(run.source, tokens, run.settings.batch_positions, run.accelerator, run.pool.map)

    def example(place: Place) -> Example:
        torch.set_num_threads(1)
        return add_features(run.source, conversation_key(*place), *texts[place], step=run.step, ahead=ahead)

    return example


def read_text(run: Run, place: Place) -> Text:
    """Reads a conversation, cut to the maximal length."""
    row, length = run.mixture.sets[place[0]][place[1]], run.settings.max_length
    tokens = torch.from_numpy(row.input_ids[:length]).long().to(run.target.device)
    return tokens, torch.from_numpy(row.loss_mask[:length]).to(run.target.device)


def _reduce(run: Run, parameters: list[torch.nn.Parameter], sums: Tensor) -> Tensor:
    """Adds up gradients and statistics of all processes."""
    if run.accelerator.num_processes == 1:
        return sums
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([g.flatten() for g in grads] + [sums.flatten().to(grads[0].device)])
    flat = run.accelerator.reduce(flat, reduction="sum")
    pieces = torch.split(flat, [*(g.numel() for g in grads), sums.numel()])
    for grad, piece in zip(grads, pieces[:-1], strict=True):
        grad.copy_(piece.view_as(grad))
    return torch.as_tensor(pieces[-1]).view_as(sums).cpu()


def _move(run: Run, loss: float, norm: float) -> None:
    if not math.isfinite(loss) or not math.isfinite(norm):
        init = run.settings.kind in EAGLE
        raise TrainingDiverged(divergence(run.step + 1, loss, norm, run.output, init=init))
    set_rate(run.optimisers, run.rate)
    for optimiser in run.optimisers:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    run.step += 1
