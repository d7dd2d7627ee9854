from __future__ import annotations

import pytest

from tests.serving.api.harness import MODEL, Harness


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [4]})])
async def test_another_models_name_is_404(harness: Harness, path: str, body: dict[str, object]) -> None:
    assert (await harness.post(path, body | {"model": MODEL})).status_code == 200
    assert (await harness.post(path, body | {"model": "other"})).status_code == 404
