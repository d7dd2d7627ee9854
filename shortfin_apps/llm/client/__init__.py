"""An asyncio client for this package's server and any other OpenAI-compatible one.

```python
async with LlmClient() as client:
    print((await client.generate("Once upon a time", max_tokens=32)).text)
    async for chunk in client.stream_chat([{"role": "user", "content": "Hello"}]):
        print(chunk.text, end="", flush=True)
```

LlmClient needs httpx, which the extra `terminal` installs, and is therefore imported on first use.
"""

from typing import TYPE_CHECKING

from shortfin_apps.llm.client.answers import (
    ChatOptions,
    Chunk,
    Generation,
    Message,
    Prompt,
    Sampling,
    ToolCall,
    ToolCallDelta,
    Usage,
    join_calls,
)
from shortfin_apps.llm.client.errors import (
    AuthenticationError,
    ClientError,
    ConnectionFailedError,
    ServerError,
)

if TYPE_CHECKING:
    from shortfin_apps.llm.client.client import LlmClient

__all__ = [
    "AuthenticationError",
    "ChatOptions",
    "Chunk",
    "ClientError",
    "ConnectionFailedError",
    "Generation",
    "LlmClient",
    "Message",
    "Prompt",
    "Sampling",
    "ServerError",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "join_calls",
]


def __getattr__(name: str) -> object:
    if name != "LlmClient":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shortfin_apps.llm.client.client import LlmClient

    return LlmClient
