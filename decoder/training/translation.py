"""A translator from sentence pairs: a vocabulary, a small encoder–decoder, a checkpoint that `decoder.load` takes."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import jax
import optax

from decoder import checkpoint
from decoder.checkpoint.atomic import write_file
from decoder.models import registry
from decoder.training import loop
from decoder.training.loss import translation_loss
from decoder.training.pairs import Batches, read_pairs

UNKNOWN, END, PAD = 0, 1, 2
_VOCABULARY = "tokenizer.model"


@dataclasses.dataclass(frozen=True)
class Plan:
  """All that a run depends on besides its data.

  vocab_size: pieces for both languages together. width, heads, hidden, encoder_layers, decoder_layers: of the network.
  context: tokens of either text; longer pairs are left out. batch_tokens: of the target, padding included, in a step.
  rate, warm_up: of the optimiser, see `loop.optimiser`. smoothing, noise: see `loss.cross_entropy`, `pairs.Batches`.
  every: steps between two looks at the held-out pairs. ValueError naming a number that makes no sense.
  """

  steps: int = 2600
  vocab_size: int = 4000
  width: int = 192
  heads: int = 4
  hidden: int = 768
  encoder_layers: int = 4
  decoder_layers: int = 3
  context: int = 256
  batch_tokens: int = 4096
  rate: float = 2e-3
  warm_up: int = 200
  smoothing: float = 0.1
  noise: float = 0.1
  every: int = 130
  seed: int = 0

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      least = 0 if field.name in ("smoothing", "noise", "seed") else 1 if isinstance(field.default, int) else 1e-12
      if not isinstance(value, type(field.default)) or value < least:
        raise ValueError(f"{field.name} must be at least {least}, got {value!r}")
    for name in ("smoothing", "noise"):
      if getattr(self, name) >= 1:
        raise ValueError(f"{name} is a share, below 1, got {getattr(self, name)!r}")
    if self.width % self.heads or self.width // self.heads % 2:
      raise ValueError(f"width {self.width} must be a multiple of 2 · heads, {2 * self.heads}")

  def config(self) -> dict[str, Any]:
    """The config.json of its network: M2M-100's parts, which norm before each part, since those train without fuss."""
    halves = {
      f"{half}_{name}": value
      for half, layers in (("encoder", self.encoder_layers), ("decoder", self.decoder_layers))
      for name, value in (("layers", layers), ("attention_heads", self.heads), ("ffn_dim", self.hidden))
    }
    return {
      "model_type": "m2m_100", "vocab_size": self.vocab_size, "d_model": self.width, **halves,
      "max_position_embeddings": self.context, "activation_function": "relu", "scale_embedding": True,
      "tie_word_embeddings": True, "is_encoder_decoder": True,
      "pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": END,
    }  # fmt: skip


def train(
  plan: Plan, data: Path, held_out: Path, out: Path, *, weights: str | None = None, progress: bool = True
) -> Path:
  """Trains on the pairs of a TSV file, going on with what lies in `out`; gives the directory of the checkpoint there.

  weights: of the checkpoint, as for `checkpoint.convert`; None is float32. Beside it: `loop.LOG`. ValueError for files
  that do not hold pairs, and for a run of another plan.
  """
  pairs, others = read_pairs(data), read_pairs(held_out)
  out = Path(out)
  loop.keep_plan(plan, out)
  model = _vocabulary(out / _VOCABULARY, pairs, plan.vocab_size)
  network = registry.build(plan.config())
  batches = Batches(
    _encoded(model, pairs, plan.context), plan.batch_tokens, plan.seed, shapes=8, noise=plan.noise, unknown=UNKNOWN
  )
  valid = list(Batches(_encoded(model, others, plan.context), plan.batch_tokens, shapes=2))
  trainer = loop.Trainer(
    translation_loss(network, END),
    loop.optimiser(plan.rate, plan.steps, plan.warm_up, _matrices),
    registry.fresh(plan.config(), jax.random.key(plan.seed)),
    out,
    smoothing=plan.smoothing,
  )
  params = trainer.run(batches.batch, plan.steps, valid, plan.every, progress)
  origin = {"trained_by": "scripts/train.py", "plan": dataclasses.asdict(plan), "pairs": len(pairs)}
  return checkpoint.save(
    jax.device_get(params), plan.config(), tokenizer_files(model), out / "model", weights=weights, origin=origin,
    progress=progress,
  )  # fmt: skip


def tokenizer_files(model: bytes) -> dict[str, bytes]:
  """What lies beside a vocabulary, so that a text is read as in training: an end token after it."""
  tokens = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
  config = {"add_bos_token": False, "add_eos_token": True, **tokens}
  return {_VOCABULARY: model, "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode()}


def _vocabulary(file: Path, pairs: list[tuple[str, str]], size: int) -> bytes:
  """A SentencePiece model of both sides (Kudo 2018, arXiv:1804.10959), made once; unknown characters are bytes."""
  if file.exists():
    return file.read_bytes()
  from sentencepiece import SentencePieceTrainer

  made = io.BytesIO()
  try:
    SentencePieceTrainer.train(
      sentence_iterator=(text for pair in pairs for text in pair), model_writer=made, vocab_size=size,
      byte_fallback=True, character_coverage=1.0, unk_id=UNKNOWN, eos_id=END, pad_id=PAD, bos_id=-1, minloglevel=2,
      max_sentence_length=1 << 16,
    )  # fmt: skip
  except RuntimeError as error:
    raise ValueError(f"vocab_size {size} does not suit these {len(pairs)} pairs: {error}") from error
  write_file(file, made.getvalue())
  return made.getvalue()


def _encoded(model: bytes, pairs: list[tuple[str, str]], context: int) -> list[tuple[list[int], list[int]]]:
  from sentencepiece import SentencePieceProcessor

  processor = SentencePieceProcessor(model_proto=model)
  sides = (processor.encode([pair[side] for pair in pairs]) for side in (0, 1))
  ids = [([*source, END], [*target, END]) for source, target in zip(*sides)]
  return [pair for pair in ids if max(map(len, pair)) <= context]


def _matrices(params: Any) -> Any:
  """Muon is for weights between layers: not for tables, and not for vectors."""

  def mark(path: tuple, leaf: Any) -> Any:
    table = any(getattr(part, "key", None) == "embed" for part in path)
    return optax.contrib.MuonDimensionNumbers() if leaf.ndim == 2 and not table else None

  return jax.tree_util.tree_map_with_path(mark, params)
