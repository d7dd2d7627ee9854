"""The application namespace that shortfin's own wheel also fills.

shortfin ships `shortfin_apps/{llm,sd,flux}` as a namespace package. A regular package found later on
`sys.path` beats a namespace portion found earlier, so this file makes our `llm` win; `extend_path`
keeps the siblings of shortfin's wheel importable.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
