"""Training on a pretended device: three steps of every method."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aquiline.training import run as training_run
from aquiline.training.loop import train
from aquiline.training.settings import KINDS
from tests.pretend_device import DEVICE, pretended_device
from tests.training.tiny_training import metrics, tiny_settings, write_set, write_target


class _Inline:
    """A pool that runs its work at once: the pretended device belongs to one thread."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        pass

    def map(self, work: Callable[..., Any], *items: Any) -> Iterator[Any]:
        return iter([work(*parts) for parts in zip(*items, strict=False)])

    def shutdown(self, **settings: Any) -> None:
        pass


class _Away:
    """An accelerator whose device is the pretended one."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.device = inner, DEVICE

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    write_target(folder / "target")
    write_set(folder / "set", conversations=8, length=18)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_equal_those_on_the_cpu(base: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"kind": kind, "total_positions": 180, "warmup_positions": 60}
    monkeypatch.setattr(training_run, "FUSION_POSITIONS", 60)  # an EAGLE-1 head is fitted first
    train(tiny_settings(base, f"{kind}-here", **settings))
    alone = training_run.start_processes()
    monkeypatch.setattr(training_run, "start_processes", lambda: _Away(alone))
    monkeypatch.setattr(training_run, "ThreadPoolExecutor", _Inline)
    with pretended_device() as counts:
        train(tiny_settings(base, f"{kind}-away", **settings))
    assert counts.kernels, "nothing ran on the device"
    here, away = (
        [line["loss"] for line in metrics(base / f"{kind}-{name}") if "loss" in line] for name in ("here", "away")
    )
    # Muon steps in bfloat16, which magnifies the rounding of other kernels.
    assert len(here) >= 3 and away[0] == pytest.approx(here[0], rel=1e-5) and away == pytest.approx(here, rel=1e-3)
