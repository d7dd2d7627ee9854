from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.serving.server import config_sources
from shortfin_apps.llm.serving.server.api_process import ApiProcessOptions


def test_options_arrive_with_their_secrets() -> None:
    settings = {
        "artifact": "model",
        "api_key": ["k", "l"],
        "admin_api_key": ["root"],
        "cors_origin": ["https://a", "https://b"],
        "tenant_weights": ["a=2"],
        "ssl_certfile": "cert.pem",
        "gateway_key": ["secret"],
        "batch_mode": "default",
        "pages": "auto",
        "request_timeout": 2.5,
        "root_path": "",
    }
    config = replace(config_sources.load(settings), source="random:tiny")
    options = ApiProcessOptions(config=config, name="m", engine_pid=7, replaces=True)
    arrived = ApiProcessOptions.from_json(options.to_json())
    assert arrived == options
    assert arrived.config.given == config.given
    assert arrived.config.http.api_key[1].get_secret_value() == "l"
