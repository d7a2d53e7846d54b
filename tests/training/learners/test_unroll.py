"""The unrolled attention and network against readable twins and step-by-step drafting."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aquiline.cache import commit
from aquiline.drafters.eagle_network import HeadConfig, Network, build_network, forward_network, new_draft_cache
from aquiline.targets.layers import LayerConfig
from aquiline.targets.rope import RopeConfig, RotaryTable
from aquiline.training.learners import causal_attention
from aquiline.training.learners import unroll as unroll_module
from aquiline.training.learners.unroll import block_mask, unroll, unrolled_attention
from tests.reference.dense_attention import dense_attention

LAYER = LayerConfig(
    hidden_size=24,
    intermediate_size=40,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=100.0, dim=4),
)


def make_network(kind: str, **switches: object) -> Network:
    torch.manual_seed(3)
    eagle3 = kind == "eagle3"
    config = HeadConfig(
        kind=kind,
        layer=LAYER,
        vocab_size=50,
        draft_vocab_size=20 if eagle3 else 50,
        target_hidden_size=24,
        features=(1, 2, 3) if eagle3 else ("final",),
        **switches,  # type: ignore[arg-type]
    )
    return build_network(config).double()


def step_tensors(steps: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    q = torch.randn(2, 6, 9, 4, dtype=dtype, requires_grad=True)
    keys = [torch.randn(2, 2, 9, 4, dtype=dtype, requires_grad=True) for _ in range(steps)]
    values = [torch.randn(2, 2, 9, 4, dtype=dtype, requires_grad=True) for _ in range(steps)]
    return q, keys, values


@pytest.fixture(params=["flash", "blocks"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to attend causally: flash attention of the CPU, and blocks of rows as on other devices."""
    kind: str = request.param
    if kind == "blocks":
        monkeypatch.setattr(causal_attention, "FLASH_DEVICES", ())
        monkeypatch.setattr(causal_attention, "ROWS", 4)
    return kind


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_attention_equals_dense_twin_in_values_and_gradients(kernel: str, steps: int, packed: bool) -> None:
    q, keys, values = step_tensors(steps, torch.float64)
    mask = None
    if packed:
        segments = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1]])
        mask = block_mask(segments, torch.float64)
    weights = torch.randn(2, 9, 24, dtype=torch.float64)
    leaves = [q, *keys, *values]
    results = []
    for attend in (unrolled_attention, dense_attention):
        out = attend(q, keys, values, 0.4, mask)
        results.append([out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)])
    for mine, twin in zip(*results, strict=True):
        torch.testing.assert_close(mine, twin, rtol=1e-9, atol=1e-9)


def test_attention_in_bfloat16_is_close_to_float32(kernel: str) -> None:
    q, keys, values = step_tensors(3, torch.float32)
    exact = dense_attention(q, keys, values, 0.5)
    rounded = unrolled_attention(q.bfloat16(), [k.bfloat16() for k in keys], [v.bfloat16() for v in values], 0.5)
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.05)


def test_block_mask_hides_other_conversations_and_the_future() -> None:
    mask = block_mask(torch.tensor([[0, 0, 1, 1]]), torch.float32)
    visible = (mask[0] == 0).int().tolist()
    assert visible == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def draft_step_by_step(
    network: Network, embedded: list[Tensor], features: Tensor, row: int, rotary: RotaryTable
) -> list[Tensor]:
    """Drafts from one row as an engine does: prefix through the cache, then one token a step."""
    cache = new_draft_cache(network, 1, 64, 64)
    with torch.no_grad():
        hidden = network.fuse(features[:, : row + 1])
        positions = torch.arange(row + 1)[None]
        stream = forward_network(network, embedded[0][:, : row + 1], hidden, positions, None, cache, [0], rotary)
        commit(cache, torch.arange(row + 1)[None], [0])
        outputs = [stream[:, -1]]
        for step in range(1, len(embedded)):
            stream = forward_network(
                network,
                embedded[step][:, row : row + 1],
                network.feedback(stream[:, -1:]),
                torch.tensor([[row + step]]),
                None,
                cache,
                [0],
                rotary,
            )
            commit(cache, torch.zeros(1, 1, dtype=torch.int64), [0])
            outputs.append(stream[:, -1])
    return outputs


@pytest.mark.parametrize(
    ("kind", "switches"),
    [
        ("eagle3", {}),
        ("eagle3", {"norm_output": True, "fc_norm": True}),
        ("eagle3", {"num_layers": 2}),
        ("eagle", {}),
    ],
)
def test_unrolled_rows_equal_drafting_step_by_step(kind: str, switches: dict[str, object]) -> None:
    network = make_network(kind, **switches)
    steps, width = 4, 7
    embedded = [torch.randn(1, width, 24, dtype=torch.float64) for _ in range(steps)]
    features = torch.randn(1, width, 72 if kind == "eagle3" else 24, dtype=torch.float64)
    rotary = RotaryTable(LAYER.rope, torch.float64)
    positions = torch.arange(width)[None]
    with torch.no_grad():
        streams = unroll(network, embedded, network.fuse(features), positions, rotary)
    for row in (0, 3, width - 1):
        drafted = draft_step_by_step(network, embedded, features, row, rotary)
        for step in range(steps):
            torch.testing.assert_close(streams[step][:, row], drafted[step], rtol=1e-8, atol=1e-8)


def saved_bytes(steps: int) -> int:
    network = make_network("eagle3")
    width = 96
    embedded = [torch.randn(1, width, 24, dtype=torch.float64) for _ in range(steps)]
    hidden = torch.randn(1, width, 24, dtype=torch.float64)
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    rotary = RotaryTable(LAYER.rope, torch.float64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        keep = unroll(network, embedded, hidden, torch.arange(width)[None], rotary)
    assert keep
    return sum(held.values())


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_recomputing_changes_memory_and_nothing_else(kind: str) -> None:
    network = make_network(kind, num_layers=2)
    embedded = [torch.randn(2, 8, 24, dtype=torch.float64) for _ in range(3)]
    hidden = torch.randn(2, 8, 24, dtype=torch.float64, requires_grad=True)
    rotary, positions = RotaryTable(LAYER.rope, torch.float64), torch.arange(8).expand(2, -1)
    leaves = [hidden, *(p for name, p in network.named_parameters() if "layer" in name)]
    results, saved = [], []
    for recompute in (False, True):
        kept: list[int] = []

        def pack(tensor: Tensor, kept: list[int] = kept) -> Tensor:
            kept.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            streams = unroll(network, embedded, hidden, positions, rotary, recompute=recompute)
        loss = sum((stream**2).sum() * (i + 1) for i, stream in enumerate(streams))
        saved.append(sum(kept))
        results.append([*streams, *torch.autograd.grad(loss, leaves)])
    for plain, again in zip(*results, strict=True):
        assert torch.equal(plain, again)
    assert saved[1] < 0.2 * saved[0]  # the layers' ends are held by their arguments, not saved here


def test_memory_for_the_backward_is_linear_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    one, four, seven = (saved_bytes(steps) for steps in (1, 4, 7))
    assert seven - four <= 1.1 * (four - one)
    monkeypatch.setattr(unroll_module, "unrolled_attention", dense_attention)
    dense_one, dense_four, dense_seven = (saved_bytes(steps) for steps in (1, 4, 7))
    assert dense_seven - dense_four > 1.3 * (dense_four - dense_one)  # the twin is not linear
