"""The end of a server whose engine is lost: answers, a dump of the last launch, and an exit status.

A lost device is of no use to this process any more, and a call of its driver may never return. The server
therefore ends its process without a destructor, and a supervisor starts it again.
"""

from __future__ import annotations

import asyncio
import logging

from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine
from shortfin_apps.llm.serving.server.start_up import EXIT_DEVICE_LOST, in_daemon_thread

logger = logging.getLogger(__name__)

LAST_ANSWERS_S = 2.0  # during which clients get their errors, and /health answers 503 with the reason
MAX_DUMP_S = 10.0  # a dump that takes longer, as on a disk that does not answer, is not waited for


async def wind_up(engine: AsyncEngine, reason: str) -> None:
    """Dump the last launch and log it; return once clients have had time to get their answers.

    No request is admitted from now on, even if the device answers after all.
    """
    draining = asyncio.ensure_future(engine.drain(0.0))
    answering = asyncio.ensure_future(asyncio.sleep(LAST_ANSWERS_S))
    why = f"the engine is lost: {reason}"
    try:
        async with asyncio.timeout(MAX_DUMP_S):
            last = await in_daemon_thread(lambda: engine.last_dump(why), "last dump")
        launch = "no launch was recorded" if last is None else f"the last launch: {last}"
    except TimeoutError:
        launch = f"the dump was not written within {MAX_DUMP_S:.0f} s"
    logger.critical("%s; %s; exiting with status %d", why, launch, EXIT_DEVICE_LOST)
    await answering
    draining.cancel()  # a device that hangs may not end what it computes
