from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.builder.sources.gguf_file import GgufSource, model_name
from shortfin_apps.llm.builder.sources.gguf_rope import rope_factors
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.rope import Llama3Scaling
from shortfin_apps.llm.model.spec import tensor_shapes
from tests.builder.gguf_data import write_random_gguf
from tests.builder.model_files import SPEC, TINY, tiny_tensors, write_gguf
from tests.builder.specs import rope_of, windows_of


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_reads_what_was_written(tiny_gguf: Path) -> None:
    source = GgufSource(tiny_gguf)
    assert source.spec.rms_norm_eps == pytest.approx(SPEC.rms_norm_eps)
    for name in ("hidden_size", "layers", "vocab_size"):
        assert getattr(source.spec, name) == getattr(SPEC, name)
    assert not source.spec.tie_word_embeddings
    for name, expected in tiny_tensors().items():
        np.testing.assert_array_equal(source.tensor(name), expected, err_msg=name)


def test_tokenizer_is_the_same(tiny_gguf: Path) -> None:
    from tokenizers import Tokenizer

    files, expected = GgufSource(tiny_gguf).tokenizer_files(), TINY.tokenizer_files()
    ours, theirs = Tokenizer.from_str(files.tokenizer), Tokenizer.from_str(expected.tokenizer)
    text = "<|im_start|>user\nHéllo 12345, wörld 🦙<|im_end|>\n"
    assert ours.encode(text).ids == theirs.encode(text).ids
    assert files.generation == expected.generation
    for key in ("bos_token", "eos_token", "pad_token", "chat_template", "add_bos_token"):
        assert files.config[key] == expected.config[key]


def test_a_missing_head_is_the_tied_embedding(tmp_path: Path) -> None:
    source = GgufSource(write_gguf(tmp_path / "tied.gguf", without="output.weight"))
    assert source.spec.tie_word_embeddings
    assert "output.weight" not in tensor_shapes(source.spec)


def test_dequantises(tmp_path: Path) -> None:
    wanted = tiny_tensors()["blk.0.ffn_down.weight"]
    quantised = gguf.quants.quantize(wanted, gguf.GGMLQuantizationType.Q8_0)
    path = tmp_path / "q8.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = gguf.GGUFReader(path).tensors[0]
    source = GgufSource.__new__(GgufSource)
    source._where, source._tensors, source.spec = "q8", {"x": tensor}, SPEC
    assert np.abs(source.tensor("x") - wanted).max() <= np.abs(wanted).max() / 127


def test_llama3_rotary_scaling_is_recognised_by_its_factors(tmp_path: Path) -> None:
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    theta = 500000.0
    factors = rope_factors(scaling, SPEC.attention.head_dim, theta).astype(np.float32)
    assert factors[0] == 1.0
    assert factors[-1] == 8.0
    path = write_gguf(
        tmp_path / "llama3.gguf", keys={"rope.freq_base": theta}, tensors={"rope_freqs.weight": factors}
    )
    assert rope_of(GgufSource(path).spec).scaling == scaling
    bent = factors.copy()
    bent[3] *= 1.5
    path = write_gguf(
        tmp_path / "bent.gguf", keys={"rope.freq_base": theta}, tensors={"rope_freqs.weight": bent}
    )
    with pytest.raises(BuildError, match="Llama 3's rule"):
        GgufSource(path)


def test_a_sliding_window_is_that_of_all_layers(tmp_path: Path) -> None:
    spec = GgufSource(write_gguf(tmp_path / "window.gguf", keys={"attention.sliding_window": 512})).spec
    assert windows_of(spec) == [512] * len(spec.layers)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_count": 8}, "a token cannot have 0 of 8 experts"),
        ({"rope.scaling.type": "longrope"}, "rotary scaling `longrope`"),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, "rotary scaling `none` by 2.0"),
        ({"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor` is 0.5"),
        ({"rope.freq_base": 1.0}, "must exceed 1"),
        ({"rope.dimension_count": 8}, "part of the head"),
        ({"attention.value_length": 8}, "value head"),
        ({"attention.head_count": 0}, "attention.head_count"),
        ({"attention.head_count_kv": 3}, "do not divide"),
        ({"feed_forward_length": 96}, "has shape"),
        ({"block_count": 2**31}, "`block_count`: Input should be less than or equal to 4096"),
        ({"block_count": 4096}, "too few"),
        ({"logit_scale": 0.5}, r"`llama\.logit_scale` is 0.5, which is not supported"),
        ({"attention.scale": 0.25}, r"`llama\.attention\.scale` is 0.25"),
        ({"hyper_gates": 3}, r"`llama\.hyper_gates` is 3, and whether .*`--accept-field llama\.hyper_gates`"),
    ],
)
def test_refuses_other_architectures(tmp_path: Path, keys: dict[str, int | str], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        GgufSource(write_gguf(tmp_path / "odd.gguf", keys=keys))


def test_refuses_a_granite_that_does_not_rotate(tmp_path: Path) -> None:
    keys = {"rope.scaling.finetuned": False}
    with pytest.raises(BuildError, match="a model without rotation"):
        GgufSource(write_gguf(tmp_path / "granite.gguf", architecture="granite", keys=keys))


def test_refuses_experts_of_families_that_have_none(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="a mixture of experts"):
        GgufSource(write_gguf(tmp_path / "granite.gguf", architecture="granite", keys={"expert_count": 8}))


def test_neutral_keys_pass_and_unknown_ones_may_be_accepted(tmp_path: Path) -> None:
    keys: dict[str, int | float | str] = {"vocab_size": 1, "logit_scale": 0.0, "rope.scaling.factor": 1.0}
    path = write_gguf(tmp_path / "odd.gguf", keys={**keys, "hyper_gates": 3})
    GgufSource(path, accepted=["llama.hyper_gates"])


def test_refuses_another_architecture_by_name(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"`cohere2` is not supported; supported are Llama 2 and 3, SmolLM2"):
        GgufSource(write_gguf(tmp_path / "cohere.gguf", architecture="cohere2"))


def test_refuses_missing_and_foreign_tensors(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"`blk\.1\.ffn_up\.weight` is missing"):
        GgufSource(write_gguf(tmp_path / "less.gguf", without="blk.1.ffn_up.weight"))
    bias = {"blk.0.ffn_norm.bias": np.zeros(64, np.float32)}
    with pytest.raises(BuildError, match=r"`blk\.0\.ffn_norm\.bias` belongs to no model"):
        GgufSource(write_gguf(tmp_path / "more.gguf", tensors=bias))
    bias = {"blk.0.attn_q.bias": np.zeros(64, np.float32)}
    with pytest.raises(BuildError, match=r"`blk\.0\.attn_k\.bias` is missing"):
        GgufSource(write_gguf(tmp_path / "half.gguf", tensors=bias))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "IQ2_XXS", "IQ1_S"])
@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_refuses_blocks_whose_scale_is_not_finite(tmp_path: Path, kind: str, scale: float) -> None:
    path = write_random_gguf(tmp_path / "inf.gguf", gguf.GGMLQuantizationType[kind], {})
    name = "blk.0.ffn_down.weight"
    (tensor,) = (each for each in gguf.GGUFReader(path).tensors if each.name == name)
    with path.open("r+b") as file:
        file.seek(int(tensor.data_offset))
        file.write(np.array([scale], np.float16).tobytes())
    with pytest.raises(BuildError, match="NaN or infinite"):
        GgufSource(path).blocks(name)


def test_refuses_nan_and_infinity(tmp_path: Path) -> None:
    norm = np.full(SPEC.hidden_size, np.nan, np.float32)
    source = GgufSource(write_gguf(tmp_path / "nan.gguf", tensors={"output_norm.weight": norm}))
    with pytest.raises(BuildError, match="NaN or infinite"):
        source.tensor("output_norm.weight")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_always_a_build_error(tiny_gguf: Path, tmp_path: Path, data: st.DataObject) -> None:
    """With bytes flipped in the header, or truncated anywhere, a file is read or refused, quickly."""
    content = bytearray(tiny_gguf.read_bytes())
    head = len(content) - sum(array.nbytes for array in tiny_tensors().values())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, head - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content[:cut])
    assert "\n" not in (_refusal(path) or "")


def _refusal(path: Path) -> str | None:
    """The reason why the file was refused; None if all of it could be read."""
    try:
        source = GgufSource(path)
        source.tokenizer_files()
        for name in tensor_shapes(source.spec):
            source.tensor(name)
    except BuildError as error:
        return str(error)
    return None


def test_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no such file"):
        GgufSource(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "SmolLM2-135M-Instruct"),
        ("llama-2-7b.Q8_0", "llama-2-7b"),
        ("model-bf16", "model"),
        ("model-IQ3_XXS", "model"),
        ("Qwen3-0.6B-UD-Q4_K_XL", "Qwen3-0.6B"),
        ("gpt-oss-20b-mxfp4", "gpt-oss-20b"),
        ("model-TQ1_0", "model"),
        ("F32", "F32"),
        ("tiny", "tiny"),
    ],
)
def test_a_model_is_named_as_its_file_without_the_quantisation(stem: str, name: str) -> None:
    assert model_name(stem) == name


def test_recommended_sampling_goes_to_the_generation_config(tiny_gguf: Path) -> None:
    plain = GgufSource(tiny_gguf).tokenizer_files().generation
    advised = GgufSource(tiny_gguf, {"temperature": 0.2}).tokenizer_files().generation
    assert advised == {**plain, "temperature": 0.2}


def test_the_files_own_sampling_goes_there_too(tmp_path: Path) -> None:
    keys = {"temp": 0.7, "top_k": 40, "top_p": 0.9, "penalty_repeat": 1.3, "mirostat": 2}
    sampling = GgufSource(with_sampling(tmp_path, keys)).tokenizer_files().generation
    expected = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.3, "mirostat": 2}
    assert {name: sampling.get(name) for name in expected} == expected


def test_keys_of_sampling_that_llama_cpp_does_not_know_replace_no_field(
    tiny_gguf: Path, tmp_path: Path
) -> None:
    keys = {"eos_token_id": 1, "bos_token_id": 2, "do_sample": False, "top_k": 40}
    sampling = GgufSource(with_sampling(tmp_path, keys)).tokenizer_files().generation
    assert sampling == GgufSource(tiny_gguf).tokenizer_files().generation | {"top_k": 40}


def test_refuses_numbers_that_are_not_finite(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", keys={"rope.freq_base": float("inf")})
    with pytest.raises(BuildError, match=r"`rope\.freq_base`: Input should be a finite number"):
        GgufSource(path)


def test_a_penalty_for_the_last_0_tokens_is_none(tmp_path: Path) -> None:
    path = with_sampling(tmp_path, {"penalty_repeat": 1.3, "penalty_last_n": 0, "temp": -1.0})
    sampling = GgufSource(path).tokenizer_files().generation
    assert (sampling.get("repetition_penalty"), sampling["temperature"]) == (None, 0.0)


def with_sampling(directory: Path, keys: Mapping[str, int | float | str]) -> Path:
    named = {f"general.sampling.{name}": value for name, value in keys.items()}
    return write_gguf(directory / "sampling.gguf", file_keys=named)
