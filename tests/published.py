"""Tokenizer files as published checkpoints of each family have them, made of tiny SentencePiece models trained here."""

import functools
import io
import json

import numpy as np
import sentencepiece

from decoder.text.languages import tokens_of_m2m_100

ENGLISH = (
  "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was "
  "upon the face of the deep. And God said, Let there be light: and there was light. And God saw the light, that it "
  "was good. The quick brown fox jumps over the lazy dog, 1234567890 times! Why? \"Because,\" he said, 'it can't wait'."
)
OTHERS = (
  "En el principio creó Dios los cielos y la tierra. Y la tierra estaba desordenada y vacía, ¿verdad? ¡Sí, señor! "
  "Am Anfang schuf Gott Himmel und Erde. Größe, Übermut, Straße. В начале сотворил Бог небо и землю. "
  "Au commencement, Dieu créa les cieux et la terre; ça, c'est l'été où il naît. 起初神创造天地。地是空虚混沌。 "
  "はじめに神は天と地とを創造された。 आदि में परमेश्वर ने आकाश और पृथ्वी की सृष्टि की। في البدء خلق الله السماوات والأرض"
)
KNOWN = "In the beginning God created the heaven."  # all of it is in every vocabulary
LANGUAGES = ("ace_Arab", "deu_Latn", "eng_Latn", "spa_Latn", "zho_Hans")
WORDS = (*ENGLISH.split(), *OTHERS.split(), "x", "A1b2", "naïve", "ﬁn", "２０２６", "½", "e\u0301", "…", "--")
ODD = (
  "🙂", "\U0001f469\u200d\U0001f467", "🇪🇸", "\u200b", "\u00a0", "\u3000", "\u2028", "\t", "\n", "\r\n", "\ufeff",
  "\u0000", "\u00ad", "ẞ", "𝔘𝔫𝔦", "ก็", "שלום", "_", "▁", "▁▁", "<", ">>", "<<", "\\", "&amp;", "%", "#", "@", "~",
)  # fmt: skip
MARKUP = (
  "<s>", "</s>", "<unk>", "<pad>", "<mask>", ">>fra<<", ">>xyz<<", "__en__", "__zz__", "eng_Latn", "<extra_id_0>",
  "<extra_id_99>", "<extra_id_100>",
)  # fmt: skip


def train(texts: str, size: int, kind: str = "unigram", **options) -> bytes:
  """A SentencePiece model."""
  model = io.BytesIO()
  sentences = [f"{part}." for part in texts.replace("。", "。 ").split(". ") for _ in range(3)]
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(sentences), model_writer=model, vocab_size=size, model_type=kind, hard_vocab_limit=False,
    character_coverage=0.995, minloglevel=2, **options,
  )  # fmt: skip
  return model.getvalue()


def pieces(model: bytes) -> list[str]:
  processor = sentencepiece.SentencePieceProcessor(model_proto=model)
  return [processor.id_to_piece(number) for number in range(len(processor))]


def without_some(texts: list[str]) -> list[str]:
  """Without seven of the longer ones, which KNOWN is not made of."""
  longer = [text for text in texts if len(text) > 2 and text not in f"▁{KNOWN.replace(' ', '▁')}"]
  return [text for text in texts if text not in longer[:7]]


def as_json(value) -> bytes:
  return json.dumps(value, ensure_ascii=False).encode()


@functools.cache
def _marian(several: bool) -> dict[str, bytes]:
  source, target = train(ENGLISH, 220), train(OTHERS, 300)
  texts = dict.fromkeys([*pieces(target), *pieces(source)])
  texts = [text for text in texts if text not in ("<s>", "</s>", "<unk>")]
  np.random.default_rng(0).shuffle(texts)
  texts = ["</s>", "<unk>", *without_some(texts), *([">>fra<<", ">>ron<<"] if several else []), "<pad>"]
  config = {"source_lang": "eng", "target_lang": "roa" if several else "spa"}
  return {
    "source.spm": source,
    "target.spm": target,
    "vocab.json": as_json({text: number for number, text in enumerate(texts)}),
    "tokenizer_config.json": as_json(config),
  }


def marian(several: bool = True) -> dict[str, bytes]:
  """several: of several target languages. Seven pieces are not in the vocabulary."""
  return dict(_marian(several))


@functools.cache
def _m2m_100() -> dict[str, bytes]:
  model = train(f"{ENGLISH} {OTHERS}", 420, "bpe")
  texts = pieces(model)[3:]
  np.random.default_rng(1).shuffle(texts)
  named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>", "pad_token": "<pad>"}
  vocabulary = ["<s>", "<pad>", "</s>", "<unk>", *without_some(texts)]
  return {
    "sentencepiece.bpe.model": model,
    "vocab.json": as_json({text: number for number, text in enumerate(vocabulary)}),
    "special_tokens_map.json": as_json({**named, "additional_special_tokens": tokens_of_m2m_100("m2m100")}),
    "tokenizer_config.json": as_json(
      {**named, "src_lang": None, "tgt_lang": None, "tokenizer_class": "M2M100Tokenizer"}
    ),
  }


def m2m_100() -> dict[str, bytes]:
  """Seven pieces are not in the vocabulary."""
  return dict(_m2m_100())


@functools.cache
def _nllb() -> dict[str, bytes]:
  named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>", "pad_token": "<pad>"}
  named |= {"cls_token": "<s>", "mask_token": {"content": "<mask>", "lstrip": True, "normalized": True}}
  return {
    "sentencepiece.bpe.model": train(f"{ENGLISH} {OTHERS}", 420, "bpe"),
    "special_tokens_map.json": as_json({**named, "additional_special_tokens": LANGUAGES}),
    "tokenizer_config.json": as_json({**named, "src_lang": None, "tgt_lang": None, "tokenizer_class": "NllbTokenizer"}),
  }


def nllb() -> dict[str, bytes]:
  """The form without tokenizer.json."""
  return dict(_nllb())


@functools.cache
def _t5(extra_ids: int) -> dict[str, bytes]:
  ids = dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
  listed = [f"<extra_id_{number}>" for number in range(extra_ids)] or None
  named = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
  return {
    "spiece.model": train(f"{ENGLISH} {OTHERS}", 420, **ids),
    "special_tokens_map.json": as_json({**named, "additional_special_tokens": listed} if listed else named),
    "tokenizer_config.json": as_json({**named, "extra_ids": extra_ids, "additional_special_tokens": listed}),
  }


def t5(extra_ids: int = 100) -> dict[str, bytes]:
  """mT5's have no extra ids."""
  return dict(_t5(extra_ids))


def texts(number: int = 240) -> list[str]:
  """Texts of all kinds: words of many scripts, odd characters, runs of spaces, markup, nothing."""
  rng, made = (
    np.random.default_rng(2),
    ["", " ", "  ", ENGLISH, OTHERS, *MARKUP, *ODD, *(f"a{markup}b" for markup in MARKUP)],
  )
  made += [f" {markup}  In the {markup} " for markup in MARKUP]
  while len(made) < number:
    chosen = [str(rng.choice(pool)) for pool in (WORDS, WORDS, WORDS, ODD, MARKUP) for _ in range(rng.integers(0, 3))]
    rng.shuffle(chosen)
    made.append("".join(one + str(rng.choice(["", " ", " ", " ", "  "])) for one in chosen))
  return made[:number]
