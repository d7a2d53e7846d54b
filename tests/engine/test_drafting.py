"""A head that takes over while requests run: the output is plain decoding's."""

from __future__ import annotations

import copy

import pytest
import torch

from aquiline.drafters.drafter import Drafter
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.eagle_network import DraftHead
from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.mixed import LookupFirst
from aquiline.drafters.trees import Chain, DynamicTree, TreePolicy
from aquiline.engine.generate import generate_requests, stream_requests
from aquiline.engine.request import Engine, Request
from aquiline.sampling import SamplingParams
from tests import tiny
from tests.drafters.taught import eagle_head

NEW_TOKENS = 24


def noisy(head: DraftHead) -> DraftHead:
    """A head with the same sizes and vocabulary and other weights."""
    network = copy.deepcopy(head.network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.002 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return DraftHead(network, head.draft_to_target)


@pytest.mark.oracle
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("kind", "policy", "lookup"),
    [("eagle3", Chain(3), True), ("eagle3", DynamicTree(8, 3, 3), False), ("eagle", Chain(3), False)],
)
def test_a_swap_in_mid_generation_changes_no_token(kind: str, policy: TreePolicy, lookup: bool, rows: int) -> None:
    target = tiny.decoder("llama")
    prompts = tiny.prompts(4)
    requests = [
        Request(prompt, SamplingParams(max_new_tokens=NEW_TOKENS, temperature=t, seed=i))
        for i, (prompt, t) in enumerate(zip([*prompts, prompts[0]], (0.0, 0.7, 0.0, 0.0, 0.0), strict=True))
    ]
    plain = generate_requests(Engine(target, None, None, ()), requests)
    texts = [(output.prompt_tokens, output.token_ids) for output in plain]
    head = eagle_head(kind, target, texts)
    drafter = EagleDrafter(head, target, policy)
    heads = [EagleDrafter(each, target, policy) for each in (noisy(head), head)]
    served: Drafter = LookupFirst(PromptLookup(), drafter) if lookup else drafter
    outputs, swaps, accepted = {}, 0, [0, 0]
    for event in stream_requests(Engine(target, served, None, (), max_rows=rows), requests):
        accepted[swaps % 2] += len(event.token_ids) > 1
        if len(event.token_ids) > 1 or swaps % 2:
            drafter.become(heads[swaps % 2])
            swaps += 1
        if event.output is not None:
            outputs[event.index] = event.output.token_ids
    assert [outputs[i] for i in range(len(requests))] == [output.token_ids for output in plain]
    assert swaps > 10 and min(accepted) > 0, "both heads drafted tokens that were accepted"


def test_a_head_of_other_sizes_or_vocabulary_cannot_take_over() -> None:
    target = tiny.decoder("llama")
    drafter = EagleDrafter(tiny.head("eagle3"), target, Chain(3))
    moved = tiny.head("eagle3")
    assert moved.draft_to_target is not None
    for head in (tiny.head("eagle"), DraftHead(moved.network, moved.draft_to_target + 1)):
        with pytest.raises(ValueError, match=r"differ in their sizes or their vocabulary.*load"):
            drafter.become(EagleDrafter(head, target, Chain(3)))
