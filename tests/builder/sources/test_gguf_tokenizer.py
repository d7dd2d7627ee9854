"""Tests rebuilt tokenizers by round trips, and by encodings of the models' own tokenizers."""

from __future__ import annotations

import json
import tracemalloc
import unicodedata
from typing import Any

import pytest
from gguf import TokenType
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from shortfin_apps.llm.builder.sources.base import TokenizerFiles
from shortfin_apps.llm.builder.sources.gguf_tokenizer import (
    GgufVocabulary,
    check_lists,
    rebuild_tokenizer,
)
from shortfin_apps.llm.builder.sources.random_tiny import byte_tokenizer
from shortfin_apps.llm.builder.sources.word_rules import WORD_RULES
from shortfin_apps.llm.contract.errors import BuildError
from tests.golden.tokenizer_vocabularies import hashes
from tests.golden.unigram import GOLDEN, NORMALISATIONS, own_unigram_ids, plain_texts
from tests.matrices import slow_but

CORPUS = ["Hello world, it's 2024 and I'll say hello 12345 times.\n\n  def f(x):\n\treturn x"] * 4


def byte_level_keys(pre: str, **keys: Any) -> dict[str, Any]:
    """GGUF keys of a vocabulary with the 256 bytes, two control tokens and merges learned from CORPUS."""
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.train_from_iterator(CORPUS, trainer)
    tokens = [token for token, _ in sorted(learned.get_vocab().items(), key=lambda item: item[1])]
    merges = [" ".join(pair) for pair in json.loads(learned.to_str())["model"]["merges"]]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": [*tokens, "<s>", "<|im_end|>", "<think>"],
        "ggml.token_type": [1] * len(tokens) + [3, 3, 4],
        "ggml.merges": merges,
        "ggml.bos_token_id": len(tokens),
        "ggml.eos_token_id": len(tokens) + 1,
        **keys,
    }


SPM_PIECES = ["▁", "a", "b", "c", "ab", "▁ab", "bc", "▁a"]
SPM_SCORES = [-10.0, -11.0, -12.0, -13.0, -2.0, -1.0, -0.5, -3.0]


def sentence_piece_keys(**keys: Any) -> dict[str, Any]:
    """Llama 2's layout: unknown, begin, end, the bytes, then pieces."""
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    return {
        "ggml.model": "llama",
        "ggml.tokens": ["<unk>", "<s>", "</s>", *bytes_, *SPM_PIECES],
        "ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(SPM_PIECES),
        "ggml.scores": [0.0] * 259 + SPM_SCORES,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        **keys,
    }


def rebuild(keys: dict[str, Any]) -> tuple[Tokenizer, TokenizerFiles]:
    files = rebuild_tokenizer("x.gguf", GgufVocabulary.model_validate(keys))
    return Tokenizer.from_str(files.tokenizer), files


BYTE_LEVEL = {pre: rebuild(byte_level_keys(pre, **{"ggml.add_bos_token": False}))[0] for pre in WORD_RULES}
SPM = rebuild(sentence_piece_keys())[0]


@given(text=st.text(max_size=40), pre=st.sampled_from(sorted(WORD_RULES)))
def test_byte_level_round_trip(text: str, pre: str) -> None:
    tokenizer = BYTE_LEVEL[pre]
    kept = unicodedata.normalize("NFC", text) if WORD_RULES[pre].composes else text
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == kept


@given(text=st.text(max_size=40).filter(lambda text: "▁" not in text))
def test_sentence_piece_round_trip(text: str) -> None:
    ids = SPM.encode(text, add_special_tokens=False).ids
    assert SPM.decode(ids, skip_special_tokens=False) == text


def words(pre: str, text: str) -> list[str]:
    """The words into which the pre-tokenizer splits `text`."""
    splits = BYTE_LEVEL[pre].pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in splits]


@pytest.mark.parametrize(
    ("pre", "cut"),
    [
        ("gpt-2", ["I", "'m", " 12345", " ok", "\n\n ", " X"]),
        ("smollm", ["I", "'m", " ", "1", "2", "3", "4", "5", " ok", "\n\n ", " X"]),
        ("llama-bpe", ["I", "'m", " ", "123", "45", " ok", "\n\n", " ", " X"]),
        ("tekken", ["I", "'m", " ", "1", "2", "3", "4", "5", " ok", "\n\n", " ", " X"]),
    ],
)
def test_text_is_split_as_by_the_models_tokenizer(pre: str, cut: list[str]) -> None:
    text = "I'm 12345 ok\n\n  X"
    assert "".join(words(pre, text)) == text
    assert words(pre, text) == cut


def test_sentence_piece_takes_the_best_score_first() -> None:
    """`bc` outranks `▁ab`, so `abc` is `▁a` + `bc`; characters without a piece fall back to bytes."""
    assert SPM.encode("abc").tokens == ["<s>", "▁a", "bc"]
    assert SPM.encode("ab").tokens == ["<s>", "▁ab"]
    assert SPM.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]


def test_gemma_4_takes_the_first_merge_of_its_list_first() -> None:
    """With which scores have nothing to do."""
    keys = sentence_piece_keys() | {"ggml.model": "gemma4", "ggml.add_space_prefix": False}
    for merges, tokens in (("a b", "b c"), ["ab", "c"]), (("b c", "a b"), ["a", "bc"]):
        tokenizer, _ = rebuild(keys | {"ggml.merges": [*merges]})
        assert tokenizer.encode("abc a").tokens == ["<s>", *tokens, "▁", "a"]
        assert tokenizer.decode(tokenizer.encode("abé c").ids) == "abé c"


def test_gemma_4_needs_merges() -> None:
    with pytest.raises(BuildError, match=r"no `tokenizer\.ggml\.merges`"):
        check_lists("x", GgufVocabulary(**sentence_piece_keys() | {"ggml.model": "gemma4"}), 1000)


def test_sentence_piece_without_space_prefix() -> None:
    tokenizer, _ = rebuild(sentence_piece_keys(**{"ggml.add_space_prefix": False}))
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["ab"]
    assert tokenizer.decode(tokenizer.encode(" ab", add_special_tokens=False).ids) == " ab"


def test_special_tokens_are_found_in_text_and_skipped_in_output() -> None:
    tokenizer, files = rebuild(byte_level_keys("smollm"))
    encoding = tokenizer.encode("hi<|im_end|><think>")
    assert encoding.tokens[-2:] == ["<|im_end|>", "<think>"]
    assert tokenizer.decode(encoding.ids) == "hi<think>"
    assert files.config["eos_token"] == "<|im_end|>"
    assert files.generation["eos_token_id"] == [tokenizer.token_to_id("<|im_end|>")]


def test_unnamed_end_tokens_are_found() -> None:
    keys = byte_level_keys("smollm")
    keys["ggml.eos_token_id"] = keys["ggml.bos_token_id"]
    tokenizer, files = rebuild(keys)
    expected = [tokenizer.token_to_id(token) for token in ("<s>", "<|im_end|>")]
    assert files.generation["eos_token_id"] == expected


def test_the_end_of_a_message_does_not_end_a_turn_of_several() -> None:
    """As gpt-oss has them; in Phi-3's vocabulary there is no other end."""
    keys = byte_level_keys("gpt-4o")
    for added in (["<|end|>"], ["<|return|>", "<|call|>"]):
        keys["ggml.tokens"] = [*keys["ggml.tokens"], *added]
        keys["ggml.token_type"] = [*keys["ggml.token_type"], *[3] * len(added)]
        tokenizer, files = rebuild(keys)
        expected = [tokenizer.token_to_id(token) for token in ("<|im_end|>", *added)]
        assert files.generation["eos_token_id"] == expected


@pytest.mark.parametrize(
    ("keys", "adds"),
    [
        (byte_level_keys("smollm"), False),
        (byte_level_keys("llama-bpe"), True),
        (byte_level_keys("tekken"), True),
        (byte_level_keys("smollm", **{"ggml.add_bos_token": True}), True),
        (sentence_piece_keys(), True),
        (sentence_piece_keys(**{"ggml.add_bos_token": False}), False),
    ],
)
def test_bos_token(keys: dict[str, Any], adds: bool) -> None:
    tokenizer, files = rebuild(keys)
    bos = keys["ggml.bos_token_id"]
    assert (bos in tokenizer.encode("ab").ids) is adds
    assert bos not in tokenizer.encode("ab", add_special_tokens=False).ids
    assert files.config["add_bos_token"] is adds


def test_llama3_takes_whole_words_without_merges() -> None:
    """A token that no merges produce is still found, as with `ignore_merges`."""
    keys = byte_level_keys("llama-bpe")
    keys["ggml.tokens"] = ["zqz" if token == "<think>" else token for token in keys["ggml.tokens"]]
    keys["ggml.token_type"][-1] = 1
    assert "zqz" in rebuild(keys)[0].encode("zqz").tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ggml.model": "bert"}, "tokenizer model `bert` is not supported; known are gemma4, gpt2, llama"),
        ({"ggml.pre": "bloom"}, "pre-tokenizer `bloom` is not supported; known are a.x-4.0, .*, tekken"),
        ({"ggml.merges": ["a"]}, "not a pair"),
        ({"ggml.merges": ["nope nope"]}, "cannot be rebuilt"),
        ({"ggml.tokens": ["a", "a"]}, "names a token twice"),
        ({"ggml.model": "llama"}, "0 scores"),
    ],
)
def test_refuses_unknown_tokenizers(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        rebuild({**byte_level_keys("smollm"), **change})


def test_a_merge_of_many_spaces_is_refused_before_it_is_cut_at_each() -> None:
    vocabulary = GgufVocabulary.model_validate(byte_level_keys("smollm") | {"ggml.merges": [" " * 2**20]})
    tracemalloc.start()
    try:
        with pytest.raises(BuildError, match="not a pair of tokens"):
            rebuild_tokenizer("x.gguf", vocabulary)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20  # 8 MB of places alone, if cut
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("bos", ["x:\x1b]0;title\x07", "$x", ":1"])
def test_refuses_a_begin_token_that_no_frame_can_have(bos: str) -> None:
    keys = byte_level_keys("smollm", **{"ggml.add_bos_token": True})
    keys["ggml.tokens"] = [bos if token == "<s>" else token for token in keys["ggml.tokens"]]
    with pytest.raises(BuildError, match=r"^x\.gguf: the tokenizer cannot be rebuilt"):
        rebuild(keys)


def test_byte_characters_are_gpt2s() -> None:
    assert set(byte_tokenizer().get_vocab()) >= set(pre_tokenizers.ByteLevel.alphabet())


def unigram_keys_of_bytes(**keys: Any) -> dict[str, Any]:
    return sentence_piece_keys(**{"ggml.model": "t5", **keys})


@pytest.mark.parametrize("rule", slow_but(set(NORMALISATIONS) - {"widths"}, NORMALISATIONS))
def test_unigram_ids_are_sentence_pieces(rule: str) -> None:
    """But where the library loses a mark that follows a character which its map replaces."""
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))[rule]
    differ = set(recorded["differ"])
    assert hashes(own_unigram_ids(rule), differ) == recorded["hashes"]
    assert len(differ) < (200 if rule == "widths" else 1)
    assert not any(plain_texts()[index].isascii() for index in differ)


def test_unigram_takes_the_best_sum_and_bytes_for_the_rest() -> None:
    tokenizer, files = rebuild(unigram_keys_of_bytes())
    assert tokenizer.encode("abc").tokens == ["▁a", "bc"]  # -3.5, where ▁ab and c have -14
    assert tokenizer.encode("é").tokens == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("abc é").ids) == "abc é"
    assert files.config["add_bos_token"] is False


def test_unigram_finds_bytes_by_their_names_only_last() -> None:
    pieces = [*SPM_PIECES, *"<0x41>"]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    keys = unigram_keys_of_bytes(
        **{
            "ggml.tokens": ["<unk>", "<s>", "</s>", *bytes_, *pieces],
            "ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
            "ggml.scores": [0.0] * 259 + SPM_SCORES + [-1.0] * 6,
        }
    )
    assert rebuild(keys)[0].encode("<0x41>").tokens == ["▁", *"<0x41>"]


@pytest.mark.parametrize(
    ("removes", "tokens"), [(True, ["▁a", "▁", "b"]), (False, ["▁", "▁", "▁a", "▁", "▁", "b", "▁"])]
)
def test_unigram_removes_spaces_if_its_model_does(removes: bool, tokens: list[str]) -> None:
    tokenizer, _ = rebuild(unigram_keys_of_bytes(**{"ggml.remove_extra_whitespaces": removes}))
    assert tokenizer.encode("  a  b ").tokens == tokens


def test_unigram_needs_scores() -> None:
    with pytest.raises(BuildError, match="has 0 scores for its tokens"):
        rebuild(unigram_keys_of_bytes(**{"ggml.scores": []}))


def lone_pieces(pieces: list[str], **keys: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary of these pieces, the first scored best."""
    scores = [-float(index) for index in range(len(pieces))]
    return {"ggml.model": "llama", "ggml.tokens": pieces, "ggml.scores": scores, **keys}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (lone_pieces(["a" * 300_000]), "a token of the vocabulary has 300,000 bytes, but at most 1,024"),
        (
            lone_pieces([f"{index:05}" + "a" * 1019 for index in range(16_400)]),
            "the vocabulary has 16,793,600 bytes, but at most 16,777,216",
        ),
        (
            lone_pieces([run * size for run in "abc" for size in range(1, 1024)]),
            "the merges of the vocabulary have 67,",
        ),
        (
            lone_pieces(["a"], **{"ggml.model": "t5", "ggml.precompiled_charsmap": [-1] * 9}),
            "`precompiled_charsmap` has 9 bytes, too few for its table of 4,294,967,295",
        ),
        (lone_pieces(["a"], chat_template="a" * 2_000_000), "a chat template has 2,000,000 characters"),
    ],
    ids=["token", "vocabulary", "merges", "charsmap", "template"],
)
def test_refuses_a_vocabulary_whose_work_would_have_no_bound(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=f"x.gguf: {message}"):
        rebuild_tokenizer("x.gguf", GgufVocabulary.model_validate(keys))


class Counted(str):
    """A text that counts how often it is compared."""

    __slots__ = ()
    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return str.__eq__(self, other)


def test_tokens_are_added_in_proportion_to_their_number() -> None:
    """None is looked for among all the special ones: files may have a million of either."""
    count = 200
    tokens: list[str] = [Counted(f"<{n}>") for n in range(2 * count)]
    kinds = [TokenType.CONTROL.value] * count + [TokenType.USER_DEFINED.value] * count
    Counted.comparisons = 0
    rebuild_tokenizer("x", GgufVocabulary.model_construct(model="gpt2", tokens=tokens, token_type=kinds))
    assert Counted.comparisons < 10 * count


@given(pieces=st.lists(st.text("abc", min_size=1, max_size=8), min_size=1, max_size=40, unique=True))
def test_merges_are_all_cuts_into_two_pieces_best_score_first(pieces: list[str]) -> None:
    """Compared with a search of all pairs."""
    model = json.loads(rebuild(lone_pieces(pieces))[1].tokenizer)["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    pairs = [
        (left, right) for whole in pieces for left in pieces for right in pieces if left + right == whole
    ]
    assert merges == pairs


def test_more_merges_than_any_vocabulary_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shortfin_apps.llm.builder.sources.gguf_tokenizer.MAX_MERGES", 3)
    with pytest.raises(BuildError, match="the vocabulary has 4 merges, but at most 3"):
        rebuild(lone_pieces(["a", "aa", "aaa", "b", "ab"]))


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_an_end_of_a_turn_ends_answers_whatever_its_type(kind: int) -> None:
    """As in llama.cpp: `<|im_end|>` of type user-defined, where the vocabulary names `</s>` as its end."""
    keys = sentence_piece_keys()
    keys["ggml.tokens"] = [*keys["ggml.tokens"], "<|im_end|>"]
    keys["ggml.token_type"] = [*keys["ggml.token_type"], kind]
    keys["ggml.scores"] = [*keys["ggml.scores"], 0.0]
    tokenizer, files = rebuild(keys)
    end = tokenizer.token_to_id("<|im_end|>")
    assert files.generation["eos_token_id"] == [2, end]
    assert end is not None
    assert tokenizer.get_added_tokens_decoder()[end].special
    assert tokenizer.encode("a<|im_end|>").ids[-1] == end


def test_tokens_that_a_gguf_file_names_are_kept() -> None:
    keys = sentence_piece_keys(**{"ggml.seperator_token_id": 2, "ggml.cls_token_id": 1})
    config = rebuild(keys)[1].config
    assert [config.get(f"{name}_token") for name in ("unk", "sep", "cls", "mask")] == [
        "<unk>",
        "</s>",
        "<s>",
        None,
    ]


def test_named_templates_of_a_gguf_file_are_kept() -> None:
    keys = sentence_piece_keys(**{"chat_template": "plain", "chat_template.tool_use": "tools"})
    assert rebuild(keys)[1].config["chat_template"] == [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]


def test_phi_3s_special_tokens_take_the_space_after_them() -> None:
    """As its own tokenizer.json and llama.cpp have it; the file does not say so."""
    added = ["<|user|>", "<|endoftext|>", "<|placeholder1|>"]
    keys = sentence_piece_keys()
    keys["ggml.token_type"][2] = TokenType.USER_DEFINED.value  # </s>, as in its files
    keys["ggml.tokens"] = [*keys["ggml.tokens"], *added]
    keys["ggml.token_type"] = [*keys["ggml.token_type"], *[TokenType.CONTROL.value] * len(added)]
    keys["ggml.scores"] = [*keys["ggml.scores"], *[0.0] * len(added)]
    tokens = ["<|user|>", "▁a", "<|endoftext|>", "▁", "▁a", "<s>", "▁", "▁a", "</s>", "▁a"]
    assert encoded(keys, "<|user|>\n a<|endoftext|> a<s> a</s> a") == tokens
    keys["ggml.tokens"] = [token.replace("<|placeholder1|>", "<|other|>") for token in keys["ggml.tokens"]]
    assert encoded(keys, "<|user|> a") == ["<|user|>", "▁", "▁a"]


def encoded(keys: dict[str, Any], text: str) -> list[str | None]:
    tokenizer = rebuild(keys)[0]
    return [tokenizer.id_to_token(each) for each in tokenizer.encode(text, add_special_tokens=False).ids]


def test_sentence_piece_has_llama_cpps_special_tokens_by_default() -> None:
    keys = sentence_piece_keys()
    lacking = {name: value for name, value in keys.items() if not name.endswith("_token_id")}
    unknown = {"ggml.unknown_token_id": 0}
    assert rebuild(lacking | unknown)[1] == rebuild(keys)[1]
    assert rebuild(lacking)[1].tokenizer == rebuild(keys)[1].tokenizer
    ids = {"ggml.eos_token_id": 1, "ggml.unknown_token_id": 2, "ggml.padding_token_id": 0}
    unigram = {**lacking, "ggml.model": "t5"}
    assert rebuild(unigram)[1] == rebuild({**unigram, **ids})[1]
    assert rebuild(unigram)[1] != rebuild({**unigram, **ids, **unknown})[1]
