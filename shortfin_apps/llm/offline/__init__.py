"""Uses a model without a server: from a program, or for a file of requests.

llm.py            LLM, for programs
local_model.py    a loaded model and its routes, called without a connection
batch/            `shortfin-llm batch`: answers OpenAI's batch files with a loaded model or a server
"""

from shortfin_apps.llm.offline.llm import LLM

__all__ = ["LLM"]
