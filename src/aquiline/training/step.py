"""One optimiser step: a batch of conversations, computed in parallel micro-batches."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aquiline.drafters.eagle_network import EagleNetwork
from aquiline.targets.decoder import Decoder
from aquiline.training.features import compute_features, conversation_key, features_in_step
from aquiline.training.learners.eagle import Example, build_micro_batch, counts, gradients, refresh
from aquiline.training.learners.initial import fit_fusion
from aquiline.training.optim import rate_factor, set_rate
from aquiline.training.processes import largest, take_from_main
from aquiline.training.running import diverged
from aquiline.training.state import Run
from aquiline.training.stream import micro_batches


class TrainingDiverged(RuntimeError):
    """The loss or the gradient is not finite; the last checkpoint is the last good state."""


@dataclass(frozen=True)
class StepReport:
    """What one step did: loss, per unrolled step the token loss and accuracy, gradient norm."""

    loss: float
    token_loss: list[float]
    accuracy: list[float]
    gradient_norm: float


def optimiser_step(run: Run) -> StepReport:
    """Takes the next batch, sums its gradients and moves the weights.

    Conversations are independent, so each worker thread takes whole micro-batches and computes
    them with one core: no barriers inside a step. Every process of a distributed run takes
    every n-th micro-batch of the same batch, and gradients are summed.

    Raises:
        TrainingDiverged: if the loss or the gradient is not finite.
    """
    settings = run.settings
    chosen = run.mixture.next_batch(settings.batch_positions)
    texts = [_text(run, source, index) for source, index in chosen]
    counted = counts([mask for _, mask in texts], settings.ttt_steps)
    scales = [settings.step_decay**i / max(1, count) for i, count in enumerate(counted)]
    lengths = [len(tokens) for tokens, _ in texts]
    groups = micro_batches(lengths, settings.micro_positions, pack=settings.pack)
    mine = groups[run.accelerator.process_index :: run.accelerator.num_processes]
    own = [i for group in mine for i in group]
    ahead = _features_ahead(run, [chosen[i] for i in own], [texts[i][0] for i in own])
    for replica in run.replicas:
        refresh(replica, run.learner)
    run.free = list(run.replicas)

    def work(group: list[int]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        torch.set_num_threads(1)
        examples = [_example(run, *chosen[i], *texts[i], ahead) for i in group]
        micro = build_micro_batch(examples, run.embedding, settings.ttt_steps, pack=settings.pack)
        replica = run.free.pop()
        result = gradients(replica, micro, scales)
        run.free.append(replica)
        return result

    sums = torch.zeros(3, settings.ttt_steps)
    parameters = list(run.learner.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    # In the order of the groups, whoever finishes first: the sum is the same for any workers.
    for loss, entropies, hits, grads in run.pool.map(work, mine):
        sums += torch.stack([entropies.cpu(), hits.cpu(), torch.full_like(hits.cpu(), loss.item())])
        for parameter, grad in zip(parameters, grads, strict=True):
            assert parameter.grad is not None
            parameter.grad += grad
    sums = _reduce(run, parameters, sums)
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, settings.clip))
    _move(run, float(sums[2, 0]), norm)
    run.seen += sum(lengths)
    means = sums / torch.tensor(counted).clamp(min=1)
    return StepReport(float(sums[2, 0]), means[0].tolist(), means[1].tolist(), norm)


def fit_start(run: Run, positions: int = 40_000) -> float:
    """Fits an untrained EAGLE-1 head's fusing linear to the first conversations of the mixture.

    Returns:
        Share of the next feature's variance that it explains.
    """
    network = run.head.network
    assert isinstance(network, EagleNetwork)
    before = run.mixture.state()
    chosen = run.mixture.next_batch(positions)
    run.mixture.restore(before)
    texts = [_text(run, source, index) for source, index in chosen]
    ahead = _features_ahead(run, chosen, [tokens for tokens, _ in texts])

    def features(i: int) -> Tensor:
        torch.set_num_threads(1)
        return _example(run, *chosen[i], *texts[i], ahead).final

    finals = list(run.pool.map(features, range(len(chosen))))
    # Row 0 is left out: the first token's states are unlike all others.
    tokens = torch.cat([tokens[2:] for tokens, _ in texts])
    embedded = run.target.embed(tokens)
    now, after = torch.cat([f[1:-1] for f in finals]), torch.cat([f[2:] for f in finals])
    share = fit_fusion(network, embedded, now, after)
    take_from_main(run.accelerator, network.parameters())
    return share


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
        raise TrainingDiverged(diverged(run.step + 1, loss, norm, run.settings.output))
    set_rate(run.optimisers, rate(run))
    for optimiser in run.optimisers:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    run.step += 1


def rate(run: Run) -> float:
    """Factor on the learning rates now."""
    return rate_factor(
        run.seen,
        warmup=run.settings.warmup_positions,
        decay_from=run.decay_from,
        decay_to=run.decay_to,
        peak=run.peak,
    )


def _text(run: Run, source: int, index: int) -> tuple[Tensor, Tensor]:
    """Tokens and mask of a conversation, cut to the maximal length."""
    row, length = run.mixture.sets[source][index], run.settings.max_length
    tokens = torch.from_numpy(row.input_ids[:length]).long().to(run.target.device)
    return tokens, torch.from_numpy(row.loss_mask[:length]).to(run.target.device)


def _features_ahead(run: Run, chosen: Sequence[tuple[int, int]], texts: Sequence[Tensor]) -> dict[str, Tensor]:
    """Features of this process's conversations where the target is spread: all processes compute in step.

    Nothing where it is not: each worker then computes what its micro-batch needs.
    """
    if not run.sharded:
        return {}
    keys = [conversation_key(*place) for place in chosen]
    unknown = {key: tokens for key, tokens in zip(keys, texts, strict=True) if not run.store or key not in run.store}
    parts = _parts(unknown, run.settings.batch_positions if isinstance(run.target, Decoder) else 0)
    found: dict[str, Tensor] = {}
    (turns,) = largest(run.accelerator, len(parts))
    for turn in range(turns):
        part = parts[turn] if turn < len(parts) else []
        rows = features_in_step(run.target, [unknown[key] for key in part], run.layout, run.pool.map)
        found.update(zip(part, rows, strict=True))
    if run.store:
        for key, computed in found.items():
            run.store.put(key, computed.cpu())
    return found


def _parts(texts: dict[str, Tensor], positions: int) -> list[list[str]]:
    """Splits conversations into groups of at most so many positions, or of one conversation."""
    parts: list[list[str]] = []
    room = 0
    for key, tokens in texts.items():
        if not parts or len(tokens) > room:
            parts.append([])
            room = positions
        parts[-1].append(key)
        room -= len(tokens)
    return parts


def _example(
    run: Run, source: int, index: int, tokens: Tensor, mask: Tensor, ahead: dict[str, Tensor] | None = None
) -> Example:
    """Adds the features to a conversation, from `ahead` or the folder where they are known."""
    key = conversation_key(source, index)
    rows = ahead.get(key) if ahead else None
    if rows is None and run.store:
        rows = run.store.get(key)
    if rows is None:
        rows = compute_features(run.target, tokens, run.layout)
        if run.store:
            run.store.put(key, rows.cpu())
    rows = rows.to(run.target.device)
    split = torch.split(rows, run.target.shape.hidden_size, dim=-1)
    parts = dict(zip(run.layout, split, strict=True))
    features = torch.cat([parts[f] for f in run.head.config.features], dim=-1)
    if run.settings.feature_noise:
        features = features + run.settings.feature_noise * _noise(run, key, features)
    return Example(tokens, mask, features, parts["final"])


def _noise(run: Run, key: str, like: Tensor) -> Tensor:
    """U(-1, 1), decided by seed, step and conversation: the same after a resume."""
    digest = hashlib.sha256(f"{run.settings.seed} {run.step} {key}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return (torch.rand(like.shape, generator=generator) * 2 - 1).to(like)
