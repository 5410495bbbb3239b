"""The tiny tokenizers of the cases: BYTE-TOK (256 byte tokens) and SPM-TOK (pieces with ▁ and byte fallback), made in
code.
"""

import json

import pytest
from hypothesis import settings

from decoder.text import tokenizer_from_files, tokenizer_from_gguf

settings.register_profile("text", deadline=None, max_examples=150, derandomize=True)
settings.load_profile("text")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def byte_alphabet() -> list[str]:
  """GPT-2's character of each byte, by its rule: printable Latin-1 stands for itself, the rest follows from U+0100."""
  chars, free = [], 0x100
  for byte in range(256):
    printable = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE
    chars.append(chr(byte) if printable else chr(free))
    free += not printable
  return chars


def byte_metadata(**changes):
  """BYTE-TOK as GGUF metadata: id = byte; 256 <pad>, 257 <bos>, 258 <eos>, 259 "Ġx", 260 <tool> (not special)."""
  tokens = [*byte_alphabet(), "<pad>", "<bos>", "<eos>", "Ġx", "<tool>"]
  types = [NORMAL] * 256 + [CONTROL] * 3 + [NORMAL, USER_DEFINED]
  return {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": tokens,
    "tokenizer.ggml.token_type": types,
    "tokenizer.ggml.merges": ["Ġ x"],
    "tokenizer.ggml.bos_token_id": 257,
    "tokenizer.ggml.eos_token_id": 258,
    "tokenizer.ggml.padding_token_id": 256,
    "tokenizer.ggml.add_bos_token": True,
  } | {f"tokenizer.{key}": value for key, value in changes.items()}


PIECES = [
  "▁",
  "▁I",
  "▁am",
  "▁he",
  "re",
  "▁leading",
  "▁x",
  "▁▁",
  "▁▁▁▁",
  "h",
  "e",
  "r",
  "l",
  "a",
  "d",
  "i",
  "n",
  "g",
  "m",
  "x",
  "t",
  "I",
  "▁t",
  "▁te",
  "te",
  "xt",
  "漢",
]


def piece_metadata(*, tail=(), controls=("<s>", "</s>", "<pad>"), **changes):
  """SPM-TOK as GGUF metadata: <unk> <s> </s> <pad> <tool>, 256 bytes from id 5 on, then PIECES."""
  named = [("<unk>", UNKNOWN), *((text, CONTROL) for text in controls), ("<tool>", USER_DEFINED)]
  entries = [*named, *((f"<0x{byte:02X}>", BYTE) for byte in range(256)), *((piece, NORMAL) for piece in PIECES), *tail]
  return {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [text for text, _ in entries],
    "tokenizer.ggml.token_type": [kind for _, kind in entries],
    "tokenizer.ggml.scores": [float(len(text)) - index / 1000 for index, (text, _) in enumerate(entries)],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 3,
    "tokenizer.ggml.unknown_token_id": 0,
  } | {f"tokenizer.{key}": value for key, value in changes.items()}


def piece_json(*, legacy=True, decoder=None):
  """SPM-TOK as the tokenizer.json that conversions of Llama 2 (legacy) and of later models have."""
  metadata = piece_metadata()
  vocabulary = {text: index for index, text in enumerate(metadata["tokenizer.ggml.tokens"])}
  replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
  merges = [["▁", "I"], ["▁", "x"], ["▁", "t"], ["▁", "▁"], ["▁t", "e"], ["t", "e"], ["x", "t"], ["r", "e"]]
  source = {
    "version": "1.0",
    "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
    "padding": None,
    "added_tokens": [
      {
        "id": vocabulary[text],
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": text != "<tool>",
      }
      for text in ("<unk>", "<s>", "</s>", "<pad>", "<tool>")
    ],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}
    if legacy
    else None,
    "pre_tokenizer": None
    if legacy
    else {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
    "post_processor": {
      "type": "TemplateProcessing",
      "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
      "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
      "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    },
    "decoder": decoder
    or {
      "type": "Sequence",
      "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
      ],
    },
    "model": {
      "type": "BPE",
      "dropout": None,
      "unk_token": "<unk>",
      "continuing_subword_prefix": None,
      "end_of_word_suffix": None,
      "fuse_unk": True,
      "byte_fallback": True,
      "ignore_merges": False,
      "vocab": vocabulary,
      "merges": merges,
    },
  }
  config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": None}
  return {"tokenizer.json": json.dumps(source).encode(), "tokenizer_config.json": json.dumps(config).encode()}


def word_piece_json():
  """A tokenizer whose decoder is neither ByteLevel nor ▁: WordPiece, which joins ## and tidies the space before a
  full stop.
  """
  vocabulary = {
    text: index for index, text in enumerate(["[UNK]", "[SEP]", "hello", "wor", "##ld", ".", "do", "n't", ",", "##s"])
  }
  source = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "added_tokens": [
      {
        "id": 1,
        "content": "[SEP]",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
      }
    ],
    "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    "model": {
      "type": "WordPiece",
      "unk_token": "[UNK]",
      "continuing_subword_prefix": "##",
      "max_input_chars_per_word": 100,
      "vocab": vocabulary,
    },
  }
  return {"tokenizer.json": json.dumps(source).encode()}


@pytest.fixture(scope="session")
def byte_tok():
  return tokenizer_from_gguf(byte_metadata())


@pytest.fixture(scope="session")
def spm_tok():
  return tokenizer_from_gguf(piece_metadata())


@pytest.fixture(
  scope="session",
  params=["byte", "pieces", "pieces_no_prefix", "json_legacy", "json_first", "json_metaspace", "word_piece"],
)
def any_tok(request):
  """One tokenizer of every way to decode."""
  makers = {
    "byte": lambda: tokenizer_from_gguf(byte_metadata()),
    "pieces": lambda: tokenizer_from_gguf(piece_metadata()),
    "pieces_no_prefix": lambda: tokenizer_from_gguf(piece_metadata(**{"ggml.add_space_prefix": False})),
    "json_legacy": lambda: tokenizer_from_files(piece_json()),
    "json_first": lambda: tokenizer_from_files(piece_json(legacy=False)),
    "json_metaspace": lambda: tokenizer_from_files(
      piece_json(
        legacy=False, decoder={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
      )
    ),
    "word_piece": lambda: tokenizer_from_files(word_piece_json()),
  }
  return makers[request.param]()


@pytest.fixture(scope="session")
def json_tok():
  return tokenizer_from_files(piece_json())


@pytest.fixture(scope="session")
def word_tok():
  return tokenizer_from_files(word_piece_json())


@pytest.fixture(scope="session")
def piece_toks():
  """SPM-TOK by (adds a leading space, removes extra spaces)."""
  return {
    (prefix, trim): tokenizer_from_gguf(
      piece_metadata(**{"ggml.add_space_prefix": prefix, "ggml.remove_extra_whitespaces": trim})
    )
    for prefix in (False, True)
    for trim in (False, True)
  }


@pytest.fixture(scope="session")
def make_bytes():
  """BYTE-TOK with changed metadata; None takes a key away."""
  return lambda **changes: tokenizer_from_gguf(_present(byte_metadata(**changes)))


@pytest.fixture(scope="session")
def make_pieces():
  """SPM-TOK with changed metadata and pieces at its end; None takes a key away."""
  return lambda **changes: tokenizer_from_gguf(_present(piece_metadata(**changes)))


def _present(metadata):
  return {key: value for key, value in metadata.items() if value is not None}
