"""A batching service for large language models compiled by IREE.

`LLM`, with everything that runs a model, is imported on first access; `__init__.pyi` has its type.
"""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name != "LLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return importlib.import_module("shortfin_apps.llm.offline.llm").LLM
