"""Loads an artefact: tokenizer, sampling defaults and the engine over the compiled model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shortfin_apps.llm import address_space
from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.artifact.verification import verifying
from shortfin_apps.llm.components.grammar.compiler import GrammarCompiler
from shortfin_apps.llm.components.runtime.open import host_of
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.contract.host_cpu import default_cpu_workers
from shortfin_apps.llm.contract.self_test_file import SelfTestFile
from shortfin_apps.llm.serving.api.sampling import SamplingDefaults, penalties, unapplied_fields
from shortfin_apps.llm.serving.api.service import Everywhere, ServedModel
from shortfin_apps.llm.serving.dialects.choose import choose_dialect, description
from shortfin_apps.llm.serving.dialects.dialect import Dialect
from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine
from shortfin_apps.llm.serving.frontend.engine_client import EngineClient
from shortfin_apps.llm.serving.frontend.metrics import ServerMetrics
from shortfin_apps.llm.serving.frontend.text_generation import TextGenerator
from shortfin_apps.llm.serving.receipts.draft import ModelIdentity, identity_of
from shortfin_apps.llm.serving.server.config import ServerConfig, ServerConfigError
from shortfin_apps.llm.serving.server.flight_recorder import dump_header
from shortfin_apps.llm.serving.server.start_up import warm_up_progress
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer, read_json_object

logger = logging.getLogger(__name__)

CONVERSATION_TOKENS = 1 << 22  # remembered of finished chats (`Conversations`): 16 MiB


class RunningEngine(EngineClient, Protocol):
    """An engine with its thread, created outside the event loop and started inside it."""

    def start(self) -> None: ...

    async def close(self, patience_s: float = ...) -> bool: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model and its engine, which is not started yet."""

    model: ServedModel
    engine: RunningEngine


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine for API processes, not started yet, and the compiler of these processes' grammars."""

    engine: AsyncEngine
    grammars: GrammarCompiler
    has_chat: bool  # whether the model has a chat template


def open_artifact(config: ServerConfig) -> Artifact:
    """Open the model directory, or the separate files named by upstream's flags. Raises ArtifactError."""
    if config.model.artifact is not None:
        return _open(config.model.artifact, config)
    assert config.model.vmfb is not None, "ServerConfig requires it"
    assert config.model.model_config is not None, "ServerConfig requires it"
    assert config.model.tokenizer_json is not None, "ServerConfig requires it"
    return Artifact.from_files(
        vmfb=config.model.vmfb,
        parameters=config.model.parameters,
        model_config=config.model.model_config,
        tokenizer_json=config.model.tokenizer_json,
        check_sizes=config.model.verify != "none",
    )


def _open(directory: Path, config: ServerConfig) -> Artifact:
    host = host_of(config.engine.device, config.engine.device_ids)
    return Artifact.open(directory, host=host, check_sizes=config.model.verify != "none")


def open_draft(config: ServerConfig) -> Artifact | None:
    """Open the draft model; return None if there is none. Raises ArtifactError."""
    if config.engine.speculative_model is None:
        return None
    try:
        return _open(config.engine.speculative_model, config)
    except ArtifactError as error:
        raise ArtifactError(f"the draft model: {error}") from error


def check_address_space(artifacts: Sequence[Artifact], config: ServerConfig) -> None:
    """Raise AddressSpaceError if the models cannot be loaded under this process's limit."""
    paths = [path for artifact in artifacts for path in (artifact.vmfb, *artifact.parameters)]
    file_bytes = sum(path.stat().st_size for path in paths)
    num_workers = config.engine.threads or default_cpu_workers()
    address_space.check_more(address_space.model_bytes(file_bytes, num_workers))


def load_model(
    artifact: Artifact, config: ServerConfig, metrics: ServerMetrics, draft: Artifact | None = None
) -> Loaded:
    """Load a model and its engine. Takes most of a server's start.

    Raises ArtifactError and ServerConfigError.
    """
    with _verified(artifact, draft, config) as confirm:
        tokenizer = load_tokenizer(artifact, config)
        grammars = GrammarCompiler(tokenizer.to_json, tokenizer.eos_token_ids)
        with grammars.preparing():
            engine = _load_engine(artifact, tokenizer, config, draft, confirm)
    return Loaded(served_model(artifact, config, tokenizer, engine, grammars, metrics), engine)


def load_engine(artifact: Artifact, config: ServerConfig, draft: Artifact | None = None) -> LoadedEngine:
    """Load the engine for API processes, which answer the requests.

    Raises ArtifactError and ServerConfigError.
    """
    with _verified(artifact, draft, config) as confirm:
        tokenizer = load_tokenizer(artifact, config)
        grammars = GrammarCompiler(tokenizer.to_json, tokenizer.eos_token_ids)
        with grammars.preparing(trials=False):
            engine = _load_engine(artifact, tokenizer, config, draft, confirm)
    return LoadedEngine(engine, grammars, tokenizer.has_chat_template)


def load_tokenizer(artifact: Artifact, config: ServerConfig) -> Tokenizer:
    """Load the tokenizer. Raises ArtifactError."""
    return Tokenizer.load(
        artifact.tokenizer, artifact.tokenizer_config, special_in_content=config.requests.special_in_content
    )


def served_model(
    artifact: Artifact,
    config: ServerConfig,
    tokenizer: Tokenizer,
    engine: EngineClient,
    grammars: GrammarCompiler,
    metrics: ServerMetrics,
    *,
    id_prefix: str = "",
    everywhere: Everywhere | None = None,
) -> ServedModel:
    """Assemble the model that the routes use; requests go to `engine`.

    TextGenerator documents `id_prefix`; ServedModel, `everywhere`.
    """
    generation = _applied(_generation_config(artifact), engine.returns_logits)
    tokenizer.prepare_templates()
    generator = TextGenerator(
        tokenizer,
        engine,
        max_seq_len=engine.max_request_tokens,
        max_requests=engine.max_requests,
        metrics=metrics,
        request_timeout_s=config.requests.request_timeout,
        conversation_tokens=CONVERSATION_TOKENS,
        grammars=grammars,
        id_prefix=id_prefix,
    )
    return ServedModel(
        generator=generator,
        # Upstream's server is always greedy, so the model's temperature is only for the other routes.
        native_defaults=_defaults({**generation, "temperature": 0.0}, 0.0, config),
        openai_defaults=_defaults(generation, 1.0, config),
        exported_top_k=artifact.config.top_k,
        dialect=_dialect(tokenizer, config),
        info=artifact.config.to_dict(),
        everywhere=everywhere,
        identity=_identity(artifact, config),
    )


def _identity(artifact: Artifact, config: ServerConfig) -> ModelIdentity | None:
    """Return the model's identity, or None if it is unknown.

    Raises ServerConfigError if it is unknown and `--receipts` needs it.
    """
    identity = identity_of(artifact)
    if identity is None and config.requests.receipts:
        raise ServerConfigError(
            "`--receipts` needs the manifest of a directory that `shortfin-llm build` wrote; serve one, or"
            " leave that option out"
        )
    return identity


@contextmanager
def _verified(
    artifact: Artifact, draft: Artifact | None, config: ServerConfig
) -> Iterator[Callable[[], None]]:
    """Verify the files while the caller's block runs; the yielded function waits for the result."""
    with ExitStack() as stack:
        confirms = [
            stack.enter_context(verifying(each, config.model.verify)) for each in (artifact, draft) if each
        ]

        def confirm() -> None:
            for each in confirms:
                each()

        yield confirm


def _dialect(tokenizer: Tokenizer, config: ServerConfig) -> Dialect:
    template = tokenizer.tool_template_source or ""
    return choose_dialect(template, config.requests.tool_parser, config.requests.reasoning_parser)


def _tell_dialect(tokenizer: Tokenizer, config: ServerConfig) -> None:
    template = tokenizer.tool_template_source or ""
    if config.requests.tool_parser not in ("auto", "none") and "tools" not in template:
        logger.warning("the chat template shows no tools to the model: describe them in a message")
    logger.info(description(_dialect(tokenizer, config)))


def _generation_config(artifact: Artifact) -> dict[str, Any]:
    """Read the sampling defaults. Raises ArtifactError."""
    return read_json_object(artifact.tokenizer.with_name("generation_config.json"))


def _applied(generation: dict[str, Any], returns_logits: bool) -> dict[str, Any]:
    """Return the sampling defaults, without penalties if the model returns no logits.

    A model without logits refuses requests with penalties, so such a default would refuse every request.
    """
    lost = () if returns_logits else penalties(generation)
    return {name: value for name, value in generation.items() if name not in lost}


def tell_defaults(generation: dict[str, Any], config: ServerConfig, *, returns_logits: bool = True) -> None:
    """Log the model's sampling defaults; warn of unsupported defaults. Raises ArtifactError."""
    applied = _applied(generation, returns_logits)
    if found := _defaults(applied, 1.0, config).differences():
        listed = ", ".join(f"{name} {value}" for name, value in found.items())
        logger.info("defaults of requests, from the model's generation_config.json: %s", listed)
    if unapplied := unapplied_fields(generation):
        logger.warning(
            "generation_config.json asks for sampling that is not applied: %s", ", ".join(unapplied)
        )
    if lost := [name for name in penalties(generation) if name not in applied]:
        logger.warning(
            "generation_config.json asks for sampling that is not applied, as this model was compiled without"
            " logits: %s",
            ", ".join(lost),
        )


def _check_same_tokens(tokenizer: Tokenizer, vocab_size: int | None, draft: Artifact) -> None:
    """Raise ArtifactError for a draft model with different token ids, or with more than `vocab_size`.

    The device reads the embedding of a drafted token without a check.
    """
    if not tokenizer.has_the_tokens_of(Tokenizer.load(draft.tokenizer, draft.tokenizer_config)):
        raise ArtifactError(
            f"{draft.tokenizer}: the draft model has other tokens than the model; `--speculative-model` "
            "needs one of the same tokenizer, as a smaller model of the same family has"
        )
    if vocab_size is not None and draft.vocab_size is not None and draft.vocab_size > vocab_size:
        raise ArtifactError(
            f"{draft.name}: the draft model has {draft.vocab_size} tokens, and the model only {vocab_size}; "
            "`--speculative-model` needs one with at most as many"
        )


def _given_pages(artifact: Artifact) -> int | None:
    """Return the number of pages in config.json, or None if `build` chose it."""
    manifest = artifact.manifest
    if manifest is not None and manifest.options.device_block_count is None:
        return None
    return artifact.config.paged_kv_cache.device_block_count


def _load_engine(
    artifact: Artifact,
    tokenizer: Tokenizer,
    config: ServerConfig,
    draft: Artifact | None,
    confirm: Callable[[], None],
) -> AsyncEngine:
    """Load the engine with the artefact's VMFB on the configured device; call `confirm` before returning."""
    if draft is not None:
        _check_same_tokens(tokenizer, artifact.vocab_size, draft)
    _tell_dialect(tokenizer, config)
    generation = _generation_config(artifact)
    _defaults(generation, 1.0, config)  # raises for invalid defaults before the model is loaded
    for each in (artifact, draft):
        if each is not None and each.choice is not None:
            logger.info("%s: %s", each.name, each.choice)
    from shortfin_apps.llm.serving import loading  # imports the device libraries
    from shortfin_apps.llm.serving.speculative_loading import DraftFiles

    name, manifest = config.model.served_model_name or artifact.name, artifact.manifest
    facts = loading.ModelFacts(
        vocab_size=artifact.vocab_size,
        tokenizer_vocab_size=tokenizer.vocab_size,
        draft_model=None
        if draft is None
        else DraftFiles(config=draft.config, vmfb=draft.vmfb, parameters=draft.parameters),
        pages=_given_pages(artifact),
        kv_events_topic=kv_events_topic(config, name),
        dumps=dump_header(artifact, config),
        self_test=_self_test(artifact, config),
        same_bits=manifest is not None and manifest.program.target.gives_same_bits,
        identity=None if manifest is None else manifest.identity,
        kernels=() if manifest is None else manifest.program.kernels,
    )
    with warm_up_progress() as on_warm_up:
        engine = loading.load_engine(
            artifact.config,
            artifact.vmfb,
            artifact.parameters,
            tokenizer.eos_token_ids,
            config.engine,
            facts,
            confirm,
            on_warm_up,
            tunes=True,
        )
    tell_defaults(generation, config, returns_logits=engine.returns_logits)
    return engine


def kv_events_topic(config: ServerConfig, model_name: str) -> str:
    """Return the default topic of KV events; warn if other machines can read the events."""
    events = config.engine.kv_events
    if events.kv_events_endpoint is not None and not events.is_local:
        logger.warning("anyone who can reach %s can read the token ids of prompts", events.kv_events_endpoint)
    return f"kv@{config.http.host}:{config.http.port}@{model_name}"


def _self_test(artifact: Artifact, config: ServerConfig) -> SelfTestFile | None:
    """Return the artefact's self-test; None if there is none or it is off.

    Raises ArtifactError for an unreadable file.
    """
    if config.engine.self_test == "off":
        return None
    if artifact.self_test is None:
        logger.info(
            "%s has no self-test: what it computes is compared with nothing; `shortfin-llm build` adds one",
            artifact.name,
        )
        return None
    return SelfTestFile.load(artifact.self_test)


def _defaults(generation: dict[str, Any], otherwise: float, config: ServerConfig) -> SamplingDefaults:
    return SamplingDefaults.of_model(
        generation, otherwise=otherwise, override=config.requests.default_temperature
    )
