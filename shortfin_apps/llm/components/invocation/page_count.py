"""How many pages of the KV cache a device has memory for."""

from __future__ import annotations

from shortfin_apps.llm.components.invocation.invoker import owned_bytes
from shortfin_apps.llm.components.runtime.device import Device, Program
from shortfin_apps.llm.config import ModelConfig


def pages_that_fit(device: Device, program: Program, config: ModelConfig, max_running: int) -> int | None:
    """Pages, with the scratch page, that there is memory for beside the program's results and workspace.

    At least those of one context, and at most those of `max_running`: more could only be kept for their
    prefixes. None where the device does not tell what it has.
    """
    context_pages = -(-config.max_seq_len // config.stride)
    fitting = []
    for stage, elements in enumerate(config.page_elements):
        spare = device.spare_bytes(stage)
        if spare is None:
            return None
        taken = owned_bytes(program) if stage == 0 else 0
        fitting.append((spare - taken) // (elements * config.paged_kv_cache.dtype.itemsize))
    return 1 + max(context_pages, min(max_running * context_pages, min(fitting) - 1))
