"""Synchronises the processes of a training run, and shards a frozen target over them.

The target is large; the head is small and stays whole in every process. Each process
keeps 1/n of every layer (FSDP2) and gathers one layer at a time, the next one meanwhile::

    process 0   [L0 L1 L2 …]/2     L0 whole: all its conversations go through ─▶ L1 whole: … ─▶
    process 1   [L0 L1 L2 …]/2     L0 whole: all its conversations go through ─▶ L1 whole: … ─▶

So a layer is gathered once for however many conversations a process has, and processes with
unequal shares, or with none, stay in step. Embedding, last norm and LM head stay whole: the
head reads them at every position.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aquiline.models.files import losing_lines
from aquiline.targets.loading import load_target
from aquiline.targets.target import Target

_OTHER_ENGINES = {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM"}


def start_processes() -> Any:
    """Joins the processes that `torchrun` or `accelerate launch` started; returns the accelerator.

    Raises:
        ValueError: if accelerate was configured for an engine that takes the training loop over.
    """
    for variable, engine in _OTHER_ENGINES.items():
        if _is_set(variable):
            raise ValueError(
                f"accelerate is configured for {engine}; allowed: several processes, or FSDP; launch with torchrun, or "
                "change `accelerate config`"
            )
    from accelerate import Accelerator

    return Accelerator(cpu=not torch.cuda.is_available())


def shards_target(asked: bool, processes: int) -> bool:
    """Decides whether to shard the target: by the setting, or by accelerate's configuration.

    Args:
        asked: the setting `shard_target`.
        processes: of the run.

    Raises:
        ValueError: if there is one process, which would hold every layer anyway.
    """
    launched = _is_set("ACCELERATE_USE_FSDP")
    if not asked and not launched:
        return False
    if processes == 1:
        name = "shard_target" if asked else "accelerate's FSDP"
        raise ValueError(
            f"{name} has no effect with one process, which holds the whole target; start several "
            "(torchrun --no-python --nproc-per-node 2 aquiline train …), or leave it out"
        )
    return True


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes")


def is_main_process() -> bool:
    """True in the process that reports; read from the launcher's environment, before anything has started."""
    return os.environ.get("RANK", "0") == "0"


def say(line: str) -> None:
    """Prints a line of progress in the main process; a full disk or a reader that left costs the line, not the run."""
    if is_main_process():
        with losing_lines(Path("standard output")):
            print(line, flush=True)


def largest(accelerator: Any, *numbers: int) -> tuple[int, ...]:
    """The largest that any process gives of each number. All processes must call it."""
    if accelerator.num_processes == 1:
        return numbers
    both = torch.tensor(numbers, dtype=torch.int64, device=accelerator.device)
    torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX)
    return tuple(both.tolist())


@torch.no_grad()
def take_from_main(accelerator: Any, tensors: Iterable[Tensor]) -> None:
    """Gives every process the main process's values. All processes must call it.

    Mutates: the tensors.
    """
    if accelerator.num_processes == 1:
        return
    for tensor in tensors:
        torch.distributed.broadcast(tensor, 0)


def load_sharded(path: str | Path, dtype: torch.dtype, accelerator: Any) -> Target:
    """Loads a target with its layers spread. All processes must call it.

    The processes of a machine load in turns, so that its memory holds the whole target once at a
    time and a device never does.

    Args:
        path: folder of the target.
        dtype: of the weights.
        accelerator: knows the processes and this one's device.

    Raises:
        ValueError: as `load_target`, and for a target that cannot be spread.
    """
    turn: int = accelerator.local_process_index
    (last,) = largest(accelerator, turn)

    def spread(model: nn.Module) -> None:
        shard_layers(model, accelerator.device)
        for _ in range(last - turn):
            accelerator.wait_for_everyone()

    for _ in range(turn):
        accelerator.wait_for_everyone()
    return load_target(path, dtype, place=spread)


def shard_layers(model: nn.Module, device: torch.device) -> None:
    """Keeps this process's part of every decoder layer on `device`, and the rest of the model whole.

    Args:
        model: our decoder or a transformers model, on the CPU.
        device: of this process.

    Raises:
        ValueError: for quantised weights, and for a model without a list of layers.

    Mutates: the model.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    name = type(model).__name__
    if getattr(model.config, "quantization_config", None):
        raise ValueError(f"{name} is quantised, and packed weights cannot be spread; leave shard_target out")
    layers = _layer_list(model)
    model.requires_grad_(False)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for layer in layers:
        fully_shard(layer.to(device), mesh=mesh, reshard_after_forward=True)
    _move_rest(model, layers, device)


def _layer_list(model: nn.Module) -> nn.ModuleList:
    config: Any = model.config
    count = getattr(config, "num_hidden_layers", None) or config.num_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {count} layers to spread; leave shard_target out")


def _move_rest(module: nn.Module, layers: nn.ModuleList, device: torch.device) -> None:
    for child in module.children():
        if child is layers:
            continue
        if any(inner is layers for inner in child.modules()):
            _move_rest(child, layers, device)
        else:
            child.to(device)


def gathered(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Steps through layers, each whole at its turn while the next one is on its way.

    All processes must step through the same layers. Layers that are not spread are always whole.

    Args:
        layers: of one target.
    """
    if not layers or not hasattr(layers[0], "unshard"):  # the name alone: FSDP's module is slow to import
        for _ in layers:
            yield
        return
    parts: list[Any] = list(layers)
    handle = parts[0].unshard(async_op=True)
    for i, part in enumerate(parts):
        handle.wait()
        if i + 1 < len(parts):
            handle = parts[i + 1].unshard(async_op=True)
        yield
        part.reshard()


@contextmanager
def whole(layer: nn.Module) -> Iterator[None]:
    """A layer's parameters can be read inside the block. All processes must enter it."""
    for _ in gathered([layer]):
        yield
