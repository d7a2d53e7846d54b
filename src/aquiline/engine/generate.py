"""Generates for any number of requests; blocking calls collect the stream."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from aquiline.engine.batch import Batch, capacity_for
from aquiline.engine.emission import Emission, outputs_of
from aquiline.engine.request import Engine, GenerationOutput, Request, StreamEvent, check

logger = logging.getLogger("aquiline")


def stream_requests(engine: Engine, requests: Sequence[Request]) -> Iterator[StreamEvent]:
    """Decodes requests as one batch; yields tokens and text as soon as they are final.

    Requests wait for a free slot, and leave it as soon as they finish. One that fails (its logits
    processor raises) ends alone, with the error in its output; a single request raises it. An output depends only on
    its own request, not on the rest of the batch (with sampled drafts: in distribution, because
    they share one generator; in bfloat16, up to near-ties where a prompt shares its beginning with
    another, whose keys it reuses). Closing the iterator frees everything.

    Yields:
        Events; the last event of each output carries the whole output.

    Raises:
        ValueError: at the call, before any work, if a request cannot run.
    """
    for index, request in enumerate(requests):
        check(engine, request, index, len(requests))
    emissions = [emission for i, request in enumerate(requests) for emission in outputs_of(engine, request, i)]
    return _stream(engine, emissions)


def _stream(engine: Engine, emissions: Sequence[Emission]) -> Iterator[StreamEvent]:
    waiting = [emission for emission in emissions if emission.finish_reason is None]
    for done in emissions:
        if done.finish_reason is not None:  # max_new_tokens is 0
            yield StreamEvent(done.index, [], "", done.finish_reason, done.output(), done.sample)
    if not waiting:
        return
    batch = Batch(engine, min(engine.max_rows, len(waiting)), capacity_for(waiting))
    batch.state.generator.manual_seed(waiting[0].seed)
    for emission in waiting:
        batch.submit(emission)
    try:
        while batch.busy:
            for event in batch.advance():
                if len(emissions) == 1 and event.error is not None:
                    raise event.error
                yield event
    finally:
        batch.clear()


def generate_requests(
    engine: Engine,
    requests: Sequence[Request],
    progress: Callable[[StreamEvent], None] | None = None,
) -> list[GenerationOutput]:
    """Decodes requests as one batch and returns their outputs in order.

    Returns:
        The n outputs of the first request, then those of the second, … An output that failed among
        others has `error`, and a warning names it.

    Raises:
        ValueError: before any work, if a request cannot run.
        Exception: the error of the first output, if all of them failed.
    """
    outputs: dict[tuple[int, int], GenerationOutput] = {}
    for event in stream_requests(engine, requests):
        if progress is not None:
            progress(event)
        if event.output is not None:
            outputs[event.index, event.sample] = event.output
    ordered = [outputs[key] for key in sorted(outputs)]
    failed = [(key, output.error) for key, output in sorted(outputs.items()) if output.error is not None]
    if failed and len(failed) == len(ordered):
        raise failed[0][1]
    for (index, _), error in failed:
        logger.warning("prompt %d of %d ended with an error: %s", index + 1, len(requests), error)
    return ordered
