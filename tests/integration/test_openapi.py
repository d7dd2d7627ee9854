"""Tests the server against its own OpenAPI document, with schemathesis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from shortfin_apps.llm.artifact.artifact import Artifact
from tests.integration.server_process import PATIENCE_S, Service, start, stop
from tests.serving.api.harness import Harness

pytestmark = pytest.mark.slow

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
ADMIN = {"Authorization": "Bearer root"}
EXAMPLES = 6  # of each route


@pytest.fixture(scope="module")
def service(tiny_artifact: Artifact) -> Iterator[Service]:
    few = ("--max-queue", "2", "--pages", "9")  # so that answers are short
    running = start(tiny_artifact, "--admin-api-key", "root", *few)
    yield running
    assert stop(running) == 0


schema = schemathesis.openapi.from_dict(Harness(loaded=False).app.openapi())


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_answers_are_as_documented(case: schemathesis.Case[Any], service: Service) -> None:
    case.call_and_validate(base_url=service.url, checks=CHECKS, headers=ADMIN, timeout=PATIENCE_S)
