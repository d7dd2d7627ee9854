"""A batching service for large language models compiled by IREE.

`LLM` is imported when it is first asked for, with all that runs a model; `__init__.pyi` has its type.
"""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name != "LLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return importlib.import_module("shortfin_apps.llm.offline.llm").LLM
