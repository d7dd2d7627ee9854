"""Checks the model name in a request."""

from __future__ import annotations

from shortfin_apps.llm.serving.api.errors import ModelNotFoundError
from shortfin_apps.llm.serving.api.service import Service


def check_model(service: Service, name: str | None) -> None:
    """Raise ModelNotFoundError for a name other than the served model's; None is accepted."""
    if name is not None and name != service.name:
        raise ModelNotFoundError(f"the model {name!r} is not served here; {service.name!r} is", "model")
