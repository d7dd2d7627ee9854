from shortfin_apps.llm.offline.llm import LLM as LLM

__version__: str
