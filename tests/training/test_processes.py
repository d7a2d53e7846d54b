"""Several processes: one run, data-parallel, with the target whole or spread."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aquiline.targets.layers import decoder_layers
from aquiline.targets.loading import load_target
from aquiline.training import loop as trainer
from aquiline.training.data.dataset import FORMAT, SplitWriter, TokenisedConversation
from aquiline.training.features import decoder_features
from aquiline.training.loop import train
from aquiline.training.processes import load_sharded, shards_target, start_processes, whole
from aquiline.training.settings import KINDS, TrainSettings
from tests.targets import hf_models
from tests.training.tiny_training import metrics, tiny_settings, weights, write_set, write_target


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    write_target(folder / "target")
    write_set(folder / "set", conversations=7, length=18)
    return folder


def _enter(rank: int, port: int, extra: dict[str, str], call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ |= extra | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)
    call(*arguments)
    if torch.distributed.is_initialized():
        # Its threads may otherwise outlive the interpreter's end, which aborts the process.
        torch.distributed.destroy_process_group()


@contextmanager
def two(call: Callable[..., None], *arguments: Any, **extra: str) -> Iterator[list[BaseProcess]]:
    """Two processes that call a function; at the end of the block both must have ended well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(target=_enter, args=(r, port, extra, call, arguments)) for r in range(2)
    ]
    for process in processes:
        process.start()
    try:
        yield processes
        for process in processes:
            process.join(200)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()


def assert_like_one_process(settings: TrainSettings) -> None:
    """Trains the same in this process, with the target whole."""
    one = dataclasses.replace(settings, output=settings.output + "-one", shard_target=False, features=None)
    train(one)
    found, expected = weights(Path(settings.output)), weights(Path(one.output))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-4)
    curves = [metrics(Path(s.output)) for s in (settings, one)]
    losses = [[r["loss"] for r in curve if "loss" in r] for curve in curves]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    alphas = [[r["alpha"] for r in curve if "alpha" in r] for curve in curves]
    assert len(alphas[0]) > 1 and np.allclose(alphas[0], alphas[1], atol=0.1)


def _weigh(folder: Path, out: Path) -> None:
    """Writes down how much of each layer this process holds, and checks what comes together."""
    accelerator = start_processes()
    spread: Any = load_sharded(folder, torch.float32, accelerator)
    mine = [sum(p.to_local().numel() for p in layer.parameters()) for layer in spread.layers]
    straight: Any = load_target(folder, torch.float32)
    texts = [torch.arange(9) % 50, torch.arange(4)][accelerator.process_index :]  # two and one
    for found, tokens in zip(decoder_features(spread, texts, (2, 7, "final")), texts, strict=True):
        assert torch.equal(found, decoder_features(straight, [tokens], (2, 7, "final"))[0])
    with whole(spread.layers[3]):
        weight = decoder_layers(spread.layers)[3].mlp.up_proj.weight
        assert torch.equal(weight, decoder_layers(straight.layers)[3].mlp.up_proj.weight)
    assert mine == [sum(p.to_local().numel() for p in layer.parameters()) for layer in spread.layers]
    (out / f"{accelerator.process_index}.json").write_text(json.dumps(mine))


def test_each_process_holds_half_of_every_layer(base: Path, tmp_path: Path) -> None:
    with two(_weigh, base / "target", tmp_path):
        pass
    target: Any = load_target(base / "target", torch.float32)
    held = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for layer, first, second in zip(target.layers, *held, strict=True):
        all_of_it = sum(p.numel() for p in layer.parameters())
        assert first + second == all_of_it and max(first, second) < 0.6 * all_of_it


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_the_same_head_with_the_target_whole_or_spread(
    base: Path, tmp_path: Path, kind: str
) -> None:
    # 7 conversations in batches of about 3: the processes never have equally many.
    folder = str(tmp_path / "features")
    settings = tiny_settings(
        base, f"two-{kind}", kind, muon_lr=0.0, features=folder, validate_positions=200, total_positions=360
    )
    with two(_train_whole_and_spread, settings):
        pass
    assert list((tmp_path / "features").glob("shard-*"))
    assert_like_one_process(settings)
    one, other = weights(base / f"two-{kind}"), weights(base / f"two-{kind}-spread")
    assert all(torch.equal(one[name], other[name]) for name in one)


def _train_whole_and_spread(settings: TrainSettings) -> None:
    train(settings)
    train(dataclasses.replace(settings, output=settings.output + "-spread", shard_target=True, features=None))


def test_spreading_changes_no_bit_of_what_two_processes_train(base: Path) -> None:
    settings = tiny_settings(base, "whole", total_positions=300)  # with Muon
    with two(_train_whole_and_spread, settings):
        pass
    one, other = weights(base / "whole"), weights(base / "whole-spread")
    assert all(torch.equal(one[name], other[name]) for name in one)


def _write_gemma(folder: Path) -> None:
    hf_models.build("gemma3").save_pretrained(folder / "target")
    (folder / "set").mkdir()
    generator, counts = np.random.default_rng(0), {}
    for split, number in (("train", 5), ("validation", 2)):
        with SplitWriter(folder / "set" / f"{split}.arrow") as writer:
            for _ in range(number):
                ids = generator.integers(3, 90, int(generator.integers(12, 20))).astype(np.int32)
                writer.add(TokenisedConversation(ids, np.arange(len(ids)) >= 4, "x", "tiny:0"))
        counts[split] = dataclasses.asdict(writer.counts)
    manifest = {"format": FORMAT, "tokenizer_hash": "tiny", "counts": counts}
    (folder / "set" / "manifest.json").write_text(json.dumps(manifest))


def test_a_target_of_transformers_is_spread_too(tmp_path: Path) -> None:
    _write_gemma(tmp_path)
    settings = tiny_settings(
        tmp_path, "spread", layers=(1, 2, 3), total_positions=150, muon_lr=0.0, validate_positions=60, shard_target=True
    )
    with two(train, settings):
        pass
    assert_like_one_process(settings)


def test_accelerates_own_switch_spreads_the_target(base: Path) -> None:
    settings = tiny_settings(base, "launched", total_positions=120, muon_lr=0.0, validate_positions=60)
    with two(_train_spread, settings, ACCELERATE_USE_FSDP="true", FSDP_VERSION="2"):
        pass
    assert_like_one_process(settings)


def _train_spread(settings: TrainSettings) -> None:
    start, seen = trainer.start_run, []

    def watched(*given: Any) -> Any:
        seen.append(start(*given))
        return seen[0]

    trainer.start_run = watched
    train(settings)
    assert seen[0].sharded


def test_a_signal_to_one_process_ends_both_at_the_same_step(base: Path) -> None:
    settings = tiny_settings(base, "signalled", total_positions=100_000, save_minutes=60.0, validate_positions=10**9)
    output = Path(settings.output)
    with two(train, settings) as processes:
        while not (output / "metrics.jsonl").is_file() or metrics(output)[-1]["step"] < 3:
            assert all(process.is_alive() for process in processes)
            time.sleep(0.01)
        (output / "decay").write_text("90000")  # only one process may read it, and both must know
        while (output / "decay").exists():
            assert all(process.is_alive() for process in processes)
            time.sleep(0.01)
        assert processes[1].pid is not None
        os.kill(processes[1].pid, signal.SIGTERM)
    step, seen, _, end = torch.load(output / "checkpoint.pt", weights_only=True)["progress"]
    assert step >= 3 and seen < end < 100_000


def test_one_process_has_nothing_to_spread() -> None:
    with pytest.raises(ValueError, match=r"shard_target has no effect with one process.*torchrun"):
        shards_target(True, 1)
    assert shards_target(True, 2) and not shards_target(False, 2)


def test_accelerates_switch_with_one_process_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="accelerate's FSDP has no effect with one process"):
        shards_target(False, 1)


def test_another_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match=r"configured for DeepSpeed.*torchrun"):
        start_processes()


def test_a_decay_file_that_is_no_number_is_ignored(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = base / "misspelt"
    output.mkdir()
    (output / "decay").write_text("100k")
    report = train(tiny_settings(base, "misspelt", total_positions=120))
    assert report.stopped == "finished" and report.positions < 200
    assert "'100k'; allowed: a number of positions" in capsys.readouterr().out
