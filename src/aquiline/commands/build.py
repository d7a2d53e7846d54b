"""aquiline build: compiles the CPU kernels ahead of their first use."""

from __future__ import annotations

import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """Adds no options: compiler and cache folder come from the environment."""
    parser.epilog = "CXX names the compiler, AQUILINE_CACHE the cache folder; AQUILINE_NATIVE=0 turns the kernels off."


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; fails where there will be no kernels."""
    from aquiline.native.library import find_library

    library, why = find_library()
    if library is None:
        raise RuntimeError(f"no CPU kernels: {why}; everything runs without them, slower")
    print(f"{library.path} (bfloat16: {library.instructions}; float32: {library.vectors})")
    return 0
