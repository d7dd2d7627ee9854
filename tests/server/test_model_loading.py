from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.frontend.metrics import ServerMetrics
from shortfin_apps.llm.errors import ArtifactError
from shortfin_apps.llm.server.model_loading import load_model, open_draft
from tests.server.settings import parse


def config_of(artifact: Artifact, **options: Any) -> Any:
    config = parse(str(artifact.vmfb.parent))
    return config.model_copy(update=options)


def test_a_draft_model_that_is_not_there_is_named(tiny_artifact: Artifact, tmp_path: Path) -> None:
    assert open_draft(config_of(tiny_artifact)) is None
    with pytest.raises(ArtifactError, match=r"the draft model: .*no-such"):
        open_draft(config_of(tiny_artifact, speculative_model=tmp_path / "no-such"))


def test_a_draft_model_of_other_tokens_is_refused(tiny_artifact: Artifact, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_artifact.vmfb.parent, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = config_of(tiny_artifact, speculative_model=other, verify="none")
    with pytest.raises(ArtifactError, match="the draft model has other tokens than the model"):
        load_model(tiny_artifact, config, ServerMetrics("m"), open_draft(config))
