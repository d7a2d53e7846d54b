"""What the processes of one training run agree on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_OTHER_ENGINES = {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM"}


def start_processes() -> Any:
    """Joins the processes that `torchrun` or `accelerate launch` started; the accelerator knows them.

    Raises:
        ValueError: if accelerate was configured for an engine that takes the training loop over.
    """
    for variable, engine in _OTHER_ENGINES.items():
        if _is_set(variable):
            raise ValueError(
                f"accelerate is configured for {engine}, which this training does not use; launch with torchrun, or "
                "answer `accelerate config` with several processes or FSDP"
            )
    from accelerate import Accelerator

    return Accelerator(cpu=not torch.cuda.is_available())


def shards_target(asked: bool, processes: int) -> bool:
    """Whether the target's layers are spread: asked for here or in accelerate's configuration.

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
    """Whether this process reports; known from the launcher's environment, before anything has started."""
    return os.environ.get("RANK", "0") == "0"


def refuse_several_processes(what: str) -> None:
    """Refuses a launcher where processes would do the same work twice, into the same files.

    Raises:
        ValueError: if the launcher started more than one process.
    """
    processes = int(os.environ.get("WORLD_SIZE") or 1)
    if processes > 1:
        raise ValueError(f"{what} runs in one process, {processes} were started; start it without a launcher")


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
