"""How does text become token ids, and ids text, for the tokenizer a checkpoint brings along?

One class, `Tokenizer`, over two libraries: `tokenizers` for a tokenizer.json and `sentencepiece` for its models, whose
pieces are tokens (`pieces.py`) or are numbered by a vocabulary beside them (`mapped.py`). A GGUF file's vocabulary is
first rewritten as those files (`vocabulary.py`), so there is one way to read each kind, and what was read can be
written. The rules for BOS, EOS and special tokens are here; incremental text is `detokenizer.py`.
"""

import abc
import unicodedata
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from decoder.text.chat import ChatTemplate
from decoder.text.config import PIECES, TOKENIZER_FILES, TURN_ENDS, VOCABULARIES, TokenizerConfig
from decoder.text.detokenizer import ByteDetokenizer, DecodeRule, Detokenizer


class Tokenizer(abc.ABC):
  """A tokenizer read from files. A subclass gives `_encode`, `find` and `_make_bytes`, and calls `_set_tokens` and
  `_set_rule`.

  `vocab_size`: ids from it on stand for nothing and must not be drawn. `eos_ids`: the tokenizer's EOS first, then the
  ends of a chat turn that its vocabulary knows. `special_tokens`: text to id of the tokens that `decode` leaves out by
  default. `named_tokens`: what a chat template may ask for, {"bos_token": "<s>", ...}; a tokenizer may lack any of
  them. `is_bytes`: every token stands for the same bytes wherever it is, but for the start of a text.
  """

  vocab_size: int
  bos_id: int | None
  eos_ids: tuple[int, ...]
  adds_bos: bool
  adds_eos: bool
  special_tokens: dict[str, int]
  named_tokens: dict[str, str]
  chat_template: str | None
  is_bytes = True

  def __init__(self, files: Mapping[str, bytes], config: TokenizerConfig):
    self._files = dict(files)
    self._config = config
    self._bytes: dict[int, bytes] = {}
    self._chat: ChatTemplate | None = None
    self._warned = False
    self.chat_template = config.chat_template

  def encode(self, text: str, *, add_bos: bool | None = None, add_eos: bool | None = None) -> list[int]:
    """The ids of a raw text; markup of special tokens in it becomes their ids.

    None adds what the model wants (`adds_bos`, `adds_eos`). There is never a second BOS: if the text already begins
    with one, it stays alone, with one warning per tokenizer. May be empty: an empty text without BOS is no prompt.
    """
    ids = self._encode(self._checked(text))
    if self.adds_bos if add_bos is None else add_bos:
      ids = self._with_bos(ids, warn=True)
    if self.adds_eos if add_eos is None else add_eos:
      if not self.eos_ids:
        raise ValueError("add_eos=True, but this tokenizer has no EOS token; leave it out")
      ids = [*ids, self.eos_ids[0]]
    return ids

  def encode_inside(self, text: str) -> list[int]:
    """The ids of a text that goes on after other tokens: without BOS, and without the space that some tokenizers put
    in front of a text."""
    return self._encode_inside(self._checked(text))

  def spellings(self, text: str) -> list[tuple[int, ...]]:
    """The ids of a text that goes on after others, as it stands and, where that is another, with a space before it.

    Not all ids that a model may write it with: a part of it may be in one token with its neighbours. ValueError for a
    text that the vocabulary lacks a part of.
    """
    texts = [text] if text[:1].isspace() else [text, f" {text}"]
    found = [tuple(self.encode_inside(one)) for one in texts]
    unknown = self.find(self.named_tokens["unk_token"]) if "unk_token" in self.named_tokens else None
    written = b"".join(self.token_bytes(token) for token in found[0]).decode("utf-8", "replace")
    lacks = not found[0] or unknown in found[0] or (self.is_bytes and _bare(written) != _bare(text))
    if lacks:
      raise ValueError(f"the tokenizer has no tokens for all of {text!r}; it writes it as {written!r}")
    return list(dict.fromkeys(ids for ids in found if ids and unknown not in ids))

  @abc.abstractmethod
  def find(self, text: str) -> int | None:
    """The id of the token with this text, as the vocabulary writes it; None if there is none."""

  def encode_chat(
    self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables
  ) -> list[int]:
    """The ids of a conversation under the tokenizer's chat template; one BOS where wanted, whoever writes it."""
    if self.chat_template is None:
      raise ValueError(
        "this tokenizer has no chat template; render one with ChatTemplate(source, tokenizer.named_tokens), "
        "or encode a raw prompt"
      )
    if self._chat is None:
      self._chat = ChatTemplate(self.chat_template, self.named_tokens)
    prompt = self._chat.render(messages, add_generation_prompt=add_generation_prompt, **variables)
    ids = self._encode(self._checked(prompt))
    return self._with_bos(ids, warn=False) if self.adds_bos else ids

  def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
    """The text of ids, which is what the deltas of `detokenizer` amount to; each undecodable byte becomes U+FFFD."""
    detokenizer = self.detokenizer(skip_special=skip_special)
    return detokenizer.feed(ids) + detokenizer.finish()

  def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
    """A new detokenizer for one stream of generated ids."""
    return ByteDetokenizer(self._rule, skip_special=skip_special)

  def token_bytes(self, token: int) -> bytes:
    """The bytes a token stands for; of a special token its markup in UTF-8; b'' for an id that the vocabulary skips."""
    data = self._bytes.get(token)
    if data is None:
      if not 0 <= token < self.vocab_size:
        raise ValueError(
          f"token id {token}: wanted 0 <= id < {self.vocab_size}; drop padding (-1) and mask the ids "
          "from vocab_size on before drawing"
        )
      data = self._bytes[int(token)] = self._make_bytes(int(token))
    return data

  def opening_bytes(self, token: int) -> bytes:
    """The bytes that a token stands for at the start of a text: without a space that is the tokenizer's own."""
    return self._rule.stripped(token) if self._rule.strip else self.token_bytes(token)

  @property
  def strip_repeats(self) -> bool:
    """Whether the text still starts after tokens that gave none."""
    return self._rule.strip_repeats

  def files(self) -> dict[str, bytes]:
    """File contents by name; written to a directory, `load_tokenizer` reads the same tokenizer from it."""
    return dict(self._files)

  @abc.abstractmethod
  def _encode(self, text: str) -> list[int]: ...

  def _encode_inside(self, text: str) -> list[int]:
    return self._encode(text)

  @abc.abstractmethod
  def _make_bytes(self, token: int) -> bytes: ...

  def _checked(self, text: str) -> str:
    if not isinstance(text, str):
      raise ValueError(f"text: wanted a string, got {type(text).__name__}; decode it first")
    try:
      text.encode("utf-8")
    except UnicodeEncodeError as error:
      raise ValueError(
        f"text: {text[error.start]!r} at {error.start} is half of a surrogate pair, not a character; "
        "decode the text with errors='replace'"
      ) from error
    return text

  def _with_bos(self, ids: list[int], *, warn: bool) -> list[int]:
    if self.bos_id is None:
      raise ValueError("add_bos=True, but this tokenizer has no BOS token; leave it out")
    if ids[:1] != [self.bos_id]:
      return [self.bos_id, *ids]
    if warn and not self._warned:
      self._warned = True
      warnings.warn(
        "the text already begins with the BOS token, so none is added; leave the markup out of the text, or pass "
        "add_bos=False",
        stacklevel=3,
      )
    return ids

  def _set_tokens(self, ids_by_text: Mapping[str, int], special: Iterable[str], ends: Iterable[str]) -> None:
    """Names the special tokens; `ids_by_text` knows these, and the named tokens and ends of a turn that exist."""
    known = {name: text for name, text in self._config.named_tokens.items() if text in ids_by_text}
    self.named_tokens = known
    self.bos_id = ids_by_text[known["bos_token"]] if "bos_token" in known else None
    texts = dict.fromkeys([*special, *known.values()])
    self.special_tokens = {text: ids_by_text[text] for text in sorted(texts, key=ids_by_text.__getitem__)}
    all_ends = [*ends, *_turn_ends(ids_by_text)]
    self.eos_ids = tuple(dict.fromkeys(ids_by_text[text] for text in all_ends if text in ids_by_text))

  def _set_rule(self, **rule) -> None:
    self._rule = DecodeRule(self.token_bytes, frozenset(self.special_tokens.values()), **rule)


def load_tokenizer(directory: str | Path) -> Tokenizer:
  """Reads the tokenizer of a checkpoint directory: its tokenizer.json, else its SentencePiece model, see
  `tokenizer_from_files`. ValueError naming the file that is missing, damaged or contradicts another."""
  directory = Path(directory)
  if not directory.is_dir():
    raise ValueError(f"tokenizer: no directory {str(directory)!r}; pass the directory of a checkpoint")
  names = [name for name in TOKENIZER_FILES if (directory / name).is_file()]
  return tokenizer_from_files({name: (directory / name).read_bytes() for name in names}, f" in {str(directory)!r}")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
  """The tokenizer that a GGUF file's metadata describes; `metadata` maps its keys to plain values and lists."""
  from decoder.text.vocabulary import files_from_gguf

  return tokenizer_from_files(files_from_gguf(metadata))


def tokenizer_from_files(files: Mapping[str, bytes], where: str = "") -> Tokenizer:
  """The tokenizer of file contents by name, as `Tokenizer.files` gives them. where: told in errors."""
  names = [name for name in VOCABULARIES if name in files]
  if not names:
    alone = "; the vocab.json there is only read beside one of these" if "vocab.json" in files else ""
    raise ValueError(
      f"tokenizer: wanted {', '.join(VOCABULARIES[:-1])} or {VOCABULARIES[-1]}{where}, found "
      f"{', '.join(files) or 'none of them'}{alone}; download it with the weights"
    )
  if names[0] == "tokenizer.json":
    from decoder.text.fast import FastTokenizer

    return FastTokenizer(files)
  if len(names) > 1:
    raise ValueError(
      f"tokenizer: {' and '.join(names)}{where} are vocabularies of different models; leave the one that belongs to "
      "the weights"
    )
  if names[0] in PIECES:
    from decoder.text.pieces import PieceTokenizer

    return PieceTokenizer(files)
  from decoder.text.mapped import MappedTokenizer

  return MappedTokenizer(files)


def _bare(text: str) -> str:
  """What normalisers leave alone."""
  return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def _turn_ends(vocabulary: Mapping[str, int]) -> list[str]:
  # In the harmony format <|end|> ends one message of several; <|return|> and <|call|> end the turn.
  harmony = "<|return|>" in vocabulary and "<|call|>" in vocabulary
  return [text for text in TURN_ENDS if not (harmony and text == "<|end|>")]
