"""GGUF metadata become the tokenizer they mean, or an error that says what is wrong with them."""

import pytest


@pytest.mark.parametrize(
  ("pre", "text", "words"),
  [
    ("gpt-2", "a  12 it's", ["a", " ", " 12", " it", "'s"]),
    ("smollm", "a  12 it's", ["a", "  ", "1", "2", " it", "'s"]),
    ("llama-bpe", "a 12345 IT'S\n\n b", ["a", " ", "123", "45", " IT", "'S", "\n\n", " b"]),
    ("qwen2", "a 12 x!\n", ["a", " ", "1", "2", " x", "!\n"]),
    ("qwen35", "नि1", ["नि", "1"]),
    ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
    ("tekken", "HelloWorld's 12", ["Hello", "World", "'s", " ", "1", "2"]),
    ("default", "a=b 1234", ["a", "=", "b", " ", "123", "4"]),
  ],
)
def test_each_pre_cuts_text_its_own_way(make_bytes, pre, text, words):
  cut = make_bytes(**{"ggml.pre": pre})._backend.pre_tokenizer.pre_tokenize_str(text)
  assert [text[start:end] for _, (start, end) in cut] == words


def test_what_the_name_of_the_cut_decides(make_bytes):
  unsaid = {"ggml.add_bos_token": None}
  assert not make_bytes(**unsaid).adds_bos
  assert make_bytes(**unsaid, **{"ggml.pre": "llama-bpe"}).adds_bos
  assert make_bytes(**{"ggml.pre": "qwen2"}).encode("e\u0301") == make_bytes(**{"ggml.pre": "qwen2"}).encode("é")
  assert make_bytes(**{"ggml.pre": None}).encode("hi") == [257, *b"hi"]
  no_merges = {"ggml.merges": []}
  assert make_bytes(**no_merges).encode(" x", add_bos=False) == [*b" x"]
  assert make_bytes(**no_merges, **{"ggml.pre": "llama-bpe"}).encode(" x", add_bos=False) == [259]  # a whole word first


def test_unused_tokens_at_the_end_are_none(make_bytes, make_pieces, byte_tok, spm_tok):
  tokens, types = list(byte_tok_tokens(byte_tok)), [1] * 256 + [3] * 3 + [1, 4]
  padded = make_bytes(**{"ggml.tokens": [*tokens, "[PAD261]", "[PAD262]"], "ggml.token_type": [*types, 5, 5]})
  assert padded.vocab_size == byte_tok.vocab_size
  assert make_pieces(tail=[("[PAD1]", 5), ("[PAD2]", 5)]).vocab_size == spm_tok.vocab_size


def byte_tok_tokens(byte_tok):
  return [byte_tok._backend.id_to_token(i) for i in range(byte_tok.vocab_size)]


def test_empty_and_repeated_pieces_are_borne(make_pieces, spm_tok):
  odd = make_pieces(tail=[("", 1), ("re", 1), ("▁x", 1), ("", 1), ("zz", 1)])
  assert odd.encode("he x") == spm_tok.encode("he x")
  assert odd.vocab_size == spm_tok.vocab_size + 5


def test_user_defined_tokens_are_parsed_and_shown(byte_tok, spm_tok):
  assert byte_tok.encode("a<tool>", add_bos=False) == [97, 260]
  assert byte_tok.decode([97, 260]) == "a<tool>"
  assert spm_tok.decode(spm_tok.encode("he<tool>re")) == "he<tool>re"


def test_a_unigram_vocabulary(make_pieces):
  t5 = make_pieces(**{"ggml.model": "t5", "ggml.bos_token_id": None, "ggml.remove_extra_whitespaces": True})
  ids = t5.encode("  he   re ")
  assert t5.adds_eos
  assert ids[-1] == 2
  assert t5.decode(ids) == "he re"


def test_none_is_written_as_minus_one(make_bytes):
  assert make_bytes(**{"ggml.bos_token_id": 0xFFFFFFFF}).bos_id is None
  assert make_bytes(**{"ggml.eos_token_id": -1}).eos_ids == ()


@pytest.mark.parametrize(
  ("changes", "match"),
  [
    ({"ggml.model": "bert"}, "wanted one of gpt2, llama, t5, got 'bert'"),
    ({"ggml.model": None}, "got None"),
    ({"ggml.pre": "klingon"}, "'klingon' is not known, known are .*smollm"),
    ({"ggml.tokens": []}, "no vocabulary"),
    ({"ggml.token_type": [1]}, "wanted 261 entries"),
    ({"ggml.merges": None}, "without merges"),
    ({"ggml.merges": ["abc"]}, "wanted two tokens"),
    ({"ggml.merges": ["q zz"]}, "tokenizer.json"),
    ({"ggml.bos_token_id": 9999}, "bos_token_id: wanted 0 <= id < 261, got 9999"),
  ],
)
def test_damaged_bpe_metadata_are_errors(make_bytes, changes, match):
  with pytest.raises(ValueError, match=match):
    make_bytes(**changes)


@pytest.mark.parametrize(
  ("changes", "match"), [({"ggml.scores": None}, "scores: wanted"), ({"ggml.scores": [1.0]}, "got 1")]
)
def test_damaged_piece_metadata_are_errors(make_pieces, changes, match):
  with pytest.raises(ValueError, match=match):
    make_pieces(**changes)
