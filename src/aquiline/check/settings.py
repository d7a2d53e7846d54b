"""Settings of a check: checked, shown by ``--help`` and written once, here."""

from __future__ import annotations

from dataclasses import dataclass

from aquiline.bench.settings import device_setting, dtype_setting, target_setting, threads_setting
from aquiline.checks import SEEDS, check_settings, check_value, setting


@dataclass(frozen=True)
class CheckSettings:
    """A check of a head, of acceptance that is only assumed, or of losslessness."""

    target: str = target_setting()
    head: str | None = setting(None, "the head: shipped name, folder, GGUF file or hub id")
    prompts: tuple[str, ...] = setting((), "files or folders of prompts", shown="the embedded questions")
    alpha: tuple[float, ...] = setting((), "acceptance by depth of a head that is not there yet", allowed="0 … 1")
    num_prompts: int = setting(
        30, "upper bound on prompts", unit="prompts", allowed="≥ 1", shown="30; 8 with --lossless"
    )
    max_new_tokens: int = setting(32, "upper bound on an answer", unit="tokens", allowed="≥ 3")
    depth: int = setting(5, "length of the drafted chains", unit="tokens", allowed="≥ 2")
    temperature: float = setting(0.8, "of the seeded outputs of --lossless", allowed="> 0")
    seed: int = setting(0, "of the seeded outputs of --lossless", allowed=SEEDS)
    dtype: str | None = dtype_setting()
    device: str = device_setting()
    threads: int | None = threads_setting()

    def __post_init__(self) -> None:
        check_settings(self)
        check_value("head", self.head, self.head != "", "a shipped name, a folder, a GGUF file or a hub id")
