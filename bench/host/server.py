"""The whole server over a device that costs no CPU time, in a process of its own.

    python -m bench.host.server --rows 128 --step-ms 10 [--profile FILE]

Its tokenizer is trained on generated prose when it starts, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import cProfile
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from bench.host.device import MAX_SEQ_LEN, TOP_K
from bench.host.engine import idle_engine
from shortfin_apps.llm.components.grammar.compiler import GrammarCompiler
from shortfin_apps.llm.serving.api.sampling import SamplingDefaults
from shortfin_apps.llm.serving.api.service import ServedModel, Service
from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine
from shortfin_apps.llm.serving.frontend.engine_client import EngineClient
from shortfin_apps.llm.serving.frontend.metrics import ServerMetrics
from shortfin_apps.llm.serving.frontend.text_generation import TextGenerator
from shortfin_apps.llm.serving.server import logs
from shortfin_apps.llm.serving.server.config import ServerConfig
from shortfin_apps.llm.serving.server.config_sources import load as load_config
from shortfin_apps.llm.serving.server.engine_process import EngineProcess
from shortfin_apps.llm.serving.server.http_server import Server, bind
from shortfin_apps.llm.serving.server.model_loading import Loaded, LoadedEngine
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer
from shortfin_apps.llm.tools.bench.workload import word_prompt

_TRAINING_WORDS = 20_000
_NAME = "idle"


def load(rows: int, step_s: float, metrics: ServerMetrics) -> Loaded:
    tokenizer = Tokenizer(trained())
    engine = make_engine(rows, tokenizer, step_s)
    return Loaded(served(tokenizer, engine, metrics), engine)


def load_engine(rows: int, step_s: float) -> LoadedEngine:
    tokenizer = Tokenizer(trained())
    grammars = GrammarCompiler(tokenizer.to_json, tokenizer.eos_token_ids)
    return LoadedEngine(make_engine(rows, tokenizer, step_s), grammars, has_chat=False)


def make_engine(rows: int, tokenizer: Tokenizer, step_s: float) -> AsyncEngine:
    return AsyncEngine(idle_engine(rows, tokenizer.vocab_size, step_s=step_s), max_requests=2 * rows)


def served(
    tokenizer: Tokenizer, engine: EngineClient, metrics: ServerMetrics, id_prefix: str = ""
) -> ServedModel:
    generator = TextGenerator(
        tokenizer,
        engine,
        max_seq_len=MAX_SEQ_LEN,
        max_requests=engine.max_requests,
        metrics=metrics,
        id_prefix=id_prefix,
    )
    defaults = SamplingDefaults(temperature=0.0)
    return ServedModel(
        generator=generator,
        native_defaults=defaults,
        openai_defaults=defaults,
        exported_top_k=TOP_K,
        info={},
    )


def serve(rows: int, step_s: float, config: ServerConfig) -> None:
    logs.set_up(config.http.log_level, config.http.log_format)
    service = Service(name=_NAME, metrics=ServerMetrics(_NAME), config={})
    server: Server | EngineProcess
    if config.api_processes:
        server = EngineProcess(config, _NAME, lambda: load_engine(rows, step_s), "bench.host.api_process")
    else:
        server = Server(config, service, lambda: load(rows, step_s, service.metrics))
    server.run(sockets=[bind(config.http.host, config.http.port)])
    if server.failure is not None:
        raise server.failure


def trained() -> tokenizers.Tokenizer:
    """Train a byte-level BPE like GPT-2's."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([word_prompt(_NAME, _TRAINING_WORDS)], trainer)
    return backend


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--api-processes", type=int, default=0)
    parser.add_argument("--log-level", default="info")
    parser.add_argument(
        "--profile", type=Path, help="a file for cProfile's counts of the event loop's thread"
    )
    args = parser.parse_args()
    settings = {"artifact": _NAME, "port": args.port, "log_level": args.log_level}
    config = load_config({**settings, "api_processes": args.api_processes})
    if args.profile is None:
        serve(args.rows, args.step_ms / 1e3, config)
        return
    profile = cProfile.Profile()
    profile.runcall(serve, args.rows, args.step_ms / 1e3, config)
    profile.dump_stats(args.profile)


if __name__ == "__main__":
    main()
