"""BOS, EOS, special tokens, errors, and that a tokenizer written is the tokenizer read."""

import json
import subprocess
import sys
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.text import load_tokenizer, tokenizer_from_files

CHAT = [{"role": "user", "content": "hi"}]


def write(directory, files):
  for name, data in files.items():
    (directory / name).write_bytes(data)
  return directory


def changed(tokenizer, **config):
  files = tokenizer.files()
  files["tokenizer_config.json"] = json.dumps(json.loads(files["tokenizer_config.json"]) | config).encode()
  return tokenizer_from_files(files)


@given(text=st.text("heretx <s>pad漢🙂\n", max_size=20), skip=st.booleans())
def test_files_give_the_same_tokenizer_back(any_tok, tmp_path_factory, text, skip):
  again = load_tokenizer(write(tmp_path_factory.mktemp("tok"), any_tok.files()))
  assert again.encode(text, add_bos=False) == any_tok.encode(text, add_bos=False)
  ids = any_tok.encode(text, add_bos=False)
  assert again.decode(ids, skip_special=skip) == any_tok.decode(ids, skip_special=skip)
  for name in (
    "vocab_size",
    "bos_id",
    "eos_ids",
    "adds_bos",
    "adds_eos",
    "special_tokens",
    "named_tokens",
    "chat_template",
  ):
    assert getattr(again, name) == getattr(any_tok, name)
  assert again.files() == any_tok.files()


def test_c51_ends_of_a_turn_count_as_end_tokens(make_pieces, make_bytes):
  gemma = make_pieces(tail=[("<end_of_turn>", 4), ("<|im_end|>", 1)])
  size = gemma.vocab_size
  assert gemma.eos_ids == (2, size - 1, size - 2)
  assert gemma.decode([size - 1, size - 2]) == ""
  named = make_bytes(**{"ggml.eot_token_id": 259, "ggml.eom_token_id": 260})
  assert named.eos_ids == (258, 259, 260)
  harmony = make_pieces(tail=[("<|end|>", 3), ("<|return|>", 3), ("<|call|>", 3)])
  assert harmony.eos_ids == (2, size - 1, size)  # <|end|> ends one message of several there


def test_c55_missing_specials_never_crash(make_pieces, make_bytes, word_tok):
  none = {f"ggml.{role}_token_id": None for role in ("bos", "eos", "padding", "unknown")}
  for tokenizer in (
    make_bytes(**none, **{"ggml.token_type": None}),
    make_pieces(controls=("[a]", "[b]", "[c]"), **none),
    word_tok,
  ):
    assert tokenizer.bos_id is None
    assert tokenizer.eos_ids == ()
    assert not tokenizer.adds_bos
    assert tokenizer.decode(tokenizer.encode("he")) in ("he", "[UNK]", "")
    with pytest.raises(ValueError, match="no BOS"):
      tokenizer.encode("a", add_bos=True)
    with pytest.raises(ValueError, match="no EOS"):
      tokenizer.encode("a", add_eos=True)


def test_c70_no_space_after_a_special_token(spm_tok, byte_tok, json_tok):
  for tokenizer, text in (
    (spm_tok, "<pad>text</s>"),
    (byte_tok, "<pad>text<eos>"),
    (json_tok, "<pad>text</s>"),
    (spm_tok, "<s>text<tool> he"),
  ):
    assert tokenizer.decode(tokenizer.encode(text, add_bos=False), skip_special=False) == text


def test_c70_negative_control_a_prefix_for_every_stretch_shows(spm_tok):
  stretches = [3, *spm_tok._first.encode("text"), 2]
  assert spm_tok.decode(stretches, skip_special=False) == "<pad> text</s>"


def test_c72_never_two_bos(byte_tok, spm_tok, json_tok):
  for tokenizer, bos in ((byte_tok, "<bos>"), (spm_tok, "<s>"), (json_tok, "<s>")):
    fresh = tokenizer_from_files(tokenizer.files())
    with pytest.warns(UserWarning, match="already begins with the BOS"):
      ids = fresh.encode(bos + "he")
    assert ids == fresh.encode("he")
    assert ids.count(fresh.bos_id) == 1
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      assert fresh.encode(bos + "he") == ids  # warned once


def test_c72_a_template_with_bos_is_no_reason_to_warn(make_bytes):
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    ids = make_bytes(chat_template="{{ bos_token }}{{ messages[0].content }}").encode_chat(CHAT)
  assert ids == [257, *b"hi"]


def test_c73_exactly_one_bos_for_prompt_and_chat(make_bytes, byte_tok):
  assert byte_tok.encode("hi") == [257, *b"hi"]
  assert byte_tok.encode("hi", add_bos=False) == [*b"hi"]
  assert make_bytes(chat_template="{{ messages[0].content }}").encode_chat(CHAT) == [257, *b"hi"]
  unwanted = make_bytes(chat_template="{{ messages[0].content }}", **{"ggml.add_bos_token": False})
  assert unwanted.encode_chat(CHAT) == unwanted.encode("hi") == [*b"hi"]
  assert unwanted.encode("hi", add_bos=True) == [257, *b"hi"]


def test_c74_an_empty_prompt_is_bos_alone_or_nothing(byte_tok, spm_tok, json_tok):
  for tokenizer in (byte_tok, spm_tok, json_tok):
    assert tokenizer.encode("") == [tokenizer.bos_id]
    assert tokenizer.encode("", add_bos=False) == []


def test_eos_is_added_where_the_tokenizer_says_so(byte_tok):
  assert not byte_tok.adds_eos
  assert changed(byte_tok, add_eos_token=True).encode("a") == [257, 97, 258]
  assert byte_tok.encode("a", add_eos=True) == [257, 97, 258]


def test_settings_beside_tokenizer_json(json_tok):
  assert json_tok.adds_bos  # from its post-processor
  assert len(json_tok.encode("I x he re te")) > 3  # its truncation to 3 is for training
  assert not changed(json_tok, add_bos_token=False).adds_bos
  template = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
  assert changed(json_tok, chat_template=template).chat_template == "d"
  files = json_tok.files() | {"chat_template.jinja": b"j"}
  assert tokenizer_from_files(files).chat_template == "j"
  extra = {str(json_tok.vocab_size): {"content": "<|eot_id|>", "special": True}}
  more = changed(json_tok, added_tokens_decoder=extra)
  assert more.encode("he<|eot_id|>")[-1] == json_tok.vocab_size == more.eos_ids[-1]


def test_added_tokens_beside_tokenizer_model(spm_tok):
  size = spm_tok.vocab_size
  files = spm_tok.files() | {
    "added_tokens.json": json.dumps({"<|im_end|>": size, "<x>": size + 1}).encode(),
    "special_tokens_map.json": b'{"additional_special_tokens": ["<|im_end|>"]}',
  }
  more = tokenizer_from_files(files)
  ids = more.encode("he<x>re<|im_end|>", add_bos=False)
  assert ids[-1] == size == more.eos_ids[-1]
  assert more.decode(ids) == "he<x>re"
  assert more.decode(ids, skip_special=False) == "he<x>re<|im_end|>"


def test_token_bytes(byte_tok, spm_tok):
  assert [byte_tok.token_bytes(i) for i in (0, 32, 195, 257, 259)] == [b"\x00", b" ", b"\xc3", b"<bos>", b" x"]
  assert [spm_tok.token_bytes(i) for i in (0, 5, 260, 262)] == [b"<unk>", b"\x00", b"\xff", b" I"]


def test_a_text_that_is_no_text_is_an_error(byte_tok, spm_tok):
  for tokenizer in (byte_tok, spm_tok):
    with pytest.raises(ValueError, match="surrogate"):
      tokenizer.encode("a\ud83d")
    with pytest.raises(ValueError, match="wanted a string"):
      tokenizer.encode(b"a")


def test_no_template_is_an_error_that_says_so(byte_tok):
  with pytest.raises(ValueError, match="no chat template"):
    byte_tok.encode_chat(CHAT)


@pytest.mark.parametrize(
  ("files", "match"),
  [
    ({}, "wanted tokenizer.json, tokenizer.model, spiece.model, source.spm or sentencepiece.bpe.model"),
    ({"tokenizer_config.json": b"{}"}, "found tokenizer_config.json"),
    ({"tokenizer.json": b"{"}, "tokenizer.json: "),
    ({"tokenizer.json": b"{}"}, "tokenizer.json: "),
    ({"tokenizer.json": b"\xff"}, "tokenizer.json: "),
    ({"tokenizer.model": b"IQ== 0\nIg== 1\n"}, "tiktoken|without pieces"),
    ({"tokenizer.model": b""}, "without pieces"),
    ({"tokenizer.model": b"\x0a\x00", "tokenizer_config.json": b"[]"}, "wanted a JSON object"),
  ],
)
def test_unreadable_directories_say_what_was_wanted(tmp_path, files, match):
  with pytest.raises(ValueError, match=match):
    load_tokenizer(write(tmp_path, files))


def test_a_missing_directory_is_an_error(tmp_path):
  with pytest.raises(ValueError, match="no directory"):
    load_tokenizer(tmp_path / "absent")


def test_importing_text_loads_neither_jax_nor_the_libraries():
  heavy = ["jax", "numpy", "flax", "tokenizers", "jinja2", "sentencepiece", "google.protobuf"]
  code = f"import sys, decoder.text; print([name for name in {heavy} if name in sys.modules])"
  run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert run.stdout.strip() == "[]"
