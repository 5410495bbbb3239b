"""A draft head for a model, from texts that the model wrote: what it should say is what the model says there.

The head learns the model's whole law at each token (distillation, Hinton et al. 2015, arXiv:1503.02531; DistillSpec,
arXiv:2310.08461), over the tokens that it drafts, and unrolled over several guesses, so that it meets features it
guessed itself in training as it does while it drafts.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decoder import checkpoint
from decoder.checkpoint.fingerprint import fingerprint
from decoder.models import registry
from decoder.models.draft_head import DraftHead, head_config
from decoder.models.llama import LlamaConfig
from decoder.models.registry import Network
from decoder.ops.linear import look_up
from decoder.training import loop
from decoder.training.gathering import Texts
from decoder.training.unrolled import Unrolled
from decoder.types import NONE, Array


@dataclasses.dataclass(frozen=True)
class Plan:
  """All that a run depends on besides its texts.

  tokens: that the head drafts, the most frequent ones. guesses: how far it is unrolled; fade: how much less each
  further guess counts. texts: in a step. rate, warm_up: of the optimiser, see `loop.optimiser`. held_out: texts, the
  last ones, that are not trained on. every: steps between two looks at them. ValueError naming a number that makes no
  sense.
  """

  steps: int = 800
  tokens: int = 6144
  guesses: int = 2
  fade: float = 0.8
  texts: int = 16
  rate: float = 2e-3
  warm_up: int = 100
  held_out: int = 64
  every: int = 100
  seed: int = 0

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      least = 0 if field.name == "seed" else 1 if isinstance(field.default, int) else 1e-12
      if not isinstance(value, type(field.default)) or value < least:
        raise ValueError(f"{field.name} must be at least {least}, got {value!r}")


class Lesson(NamedTuple):
  """vectors_BTD: of the tokens, by the model's own table. features_BTD: the model's. asked_BT: where the head's law is
  compared with the model's. table_RD: rows of the table that makes logits, of the tokens that the head drafts."""

  vectors_BTD: Any
  features_BTD: Any
  asked_BT: Any
  table_RD: Any


class Told(NamedTuple):
  """By guess, sums over all tokens compared: loss_S, cross-entropy in nats; kept_S, Σ min(p, q), which is how many
  would be accepted; number_S: how many there are."""

  loss_S: Array
  kept_S: Array
  number_S: Array


def frequent(texts: Texts, size: int, always: tuple[int, ...] = ()) -> np.ndarray:
  """The ids, ascending, that come up most in what was written, `always` among them. Fewer where fewer come up."""
  steps = np.arange(texts.ids_NL.shape[1])[None]
  written = (steps >= texts.spans_N2[:, :1]) & (steps < texts.spans_N2[:, 1:])
  count_V = np.bincount(texts.ids_NL[written])
  order = np.argsort(-count_V, kind="stable")
  chosen = [*always, *(int(i) for i in order if count_V[i] > 0 and i not in always)][:size]
  return np.sort(np.asarray(chosen, np.int32))


def told(head: DraftHead, params: Any, lesson: Lesson, guesses: int) -> Told:
  """How the head's law compares with the model's, guess by guess.

  At a token the head is given its vector and the features before it, and asked what follows; so is the model, whose
  features of the token are known. For the second guess, the features before it are the head's own, and so on.
  """
  batch, length = lesson.asked_BT.shape
  positions_BT = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
  features_BTD = lesson.features_BTD.astype(jnp.float32)
  vectors_BTD, table_RD = lesson.vectors_BTD.astype(jnp.float32), lesson.table_RD
  model_BTR = jax.nn.softmax(features_BTD @ table_RD.T)
  sums = []
  for guess, guessed_BTD in enumerate(unroll(head, params, vectors_BTD, features_BTD, guesses)):
    head_BTR = guessed_BTD @ table_RD.T
    mass_BT = jax.nn.logsumexp(head_BTR, axis=-1)
    loss_BT = mass_BT - jnp.sum(model_BTR * head_BTR, axis=-1)
    kept_BT = jnp.sum(jnp.minimum(model_BTR, jnp.exp(jax.lax.stop_gradient(head_BTR - mass_BT[..., None]))), axis=-1)
    asked_BT = lesson.asked_BT & (positions_BT >= guess)
    sums.append([jnp.sum(jnp.where(asked_BT, x, 0.0)) for x in (loss_BT, kept_BT, jnp.float32(1))])
  return Told(*(jnp.stack(column) for column in zip(*sums)))


def unroll(head: DraftHead, params: Any, vectors_BTD: Array, features_BTD: Array, guesses: int) -> list[Array]:
  """What the head takes the features of each token to be, guess by guess: the first follows what the model found before
  the token, each further one what the guess before found there."""
  batch, length = vectors_BTD.shape[:2]
  positions_BT = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
  found, cache = [], Unrolled(positions_BT)
  for _ in range(guesses):
    before_BTD = jnp.pad(features_BTD[:, :-1], ((0, 0), (1, 0), (0, 0)))
    features_BTD, cache = head.apply({"params": params}, vectors_BTD, before_BTD, positions_BT, cache)
    found.append(features_BTD)
  return found


def train(
  plan: Plan,
  texts: Texts,
  network: Network,
  params: Any,
  config: Mapping[str, Any],
  ends: Sequence[int],
  out: Path,
  *,
  weights: str | None = None,
  progress: bool = True,
) -> Path:
  """Trains a head for a model, of these parameters and config.json, on texts that it wrote, going on with what lies in
  `out`; gives the directory of the head there.

  ends: ids that end a text, which the head drafts in any case. weights: of the head, as for `checkpoint.convert`; None
  is float32. Beside it: `loop.LOG`. ValueError for a model that no head can follow, for too few texts, and for a run of
  another plan.
  """
  if network.tables is None:
    raise ValueError("a head that drafts is offered for models of Llama's family")
  vectors_VD, logits_VD = network.tables(params)
  trained, head = fitted(plan, texts, _floats(vectors_VD), _floats(logits_VD), config, ends, Path(out), progress)
  origin = {"trained_by": "scripts/distill.py", "plan": dataclasses.asdict(plan), "texts": len(texts.ids_NL)}
  described = {**head, "target": fingerprint(params)}
  return checkpoint.save(
    jax.device_get(trained), described, {}, Path(out) / "head", weights=weights, origin=origin, progress=progress
  )


def fitted(
  plan: Plan, texts: Texts, vectors_VD: np.ndarray, logits_VD: np.ndarray, model: Mapping[str, Any],
  ends: Sequence[int], out: Path, progress: bool,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
  """The parameters of a head, and its config. vectors_VD, logits_VD: the model's tables, see `registry.Network`."""
  if len(texts.ids_NL) < plan.held_out + plan.texts:
    raise ValueError(f"{len(texts.ids_NL)} texts are too few for steps of {plan.texts} and {plan.held_out} held out")
  loop.keep_plan(plan, out)
  trained = len(texts.ids_NL) - plan.held_out
  ids_R = frequent(Texts(*(x[:trained] for x in texts)), plan.tokens, tuple(ends))
  config = head_config(model, [int(i) for i in ids_R])
  head = DraftHead(LlamaConfig.from_dict(config), jnp.float32)
  table_RD = jax.device_put(logits_VD[ids_R])
  weight_S = plan.fade ** np.arange(plan.guesses, dtype=np.float32)

  def loss(params: Any, lesson: Lesson, smoothing: float = 0.0) -> tuple[Array, Array]:
    sums = told(head, params, lesson, plan.guesses)
    return jnp.sum(weight_S * sums.loss_S), jnp.sum(weight_S * sums.number_S)

  def kept(params: Any, lesson: Lesson) -> dict[str, tuple[Array, Array]]:
    sums = told(head, params, lesson, plan.guesses)
    return {f"kept_{i + 1}": (sums.kept_S[i], sums.number_S[i]) for i in range(plan.guesses)}

  def lesson(rows: np.ndarray) -> Lesson:
    return _lesson(texts, rows, vectors_VD, table_RD)

  def batch(step: int) -> Lesson:
    epoch, at = divmod(step * plan.texts, trained - trained % plan.texts)
    order = np.random.default_rng((plan.seed, epoch)).permutation(trained)
    return lesson(np.sort(order[at : at + plan.texts]))

  valid = [lesson(trained + np.arange(i, i + plan.texts)) for i in range(0, plan.held_out, plan.texts)]
  change = loop.optimiser(plan.rate, plan.steps, plan.warm_up, _matrices)
  begin = registry.fresh(config, jax.random.key(plan.seed))
  trainer = loop.Trainer(loss, change, begin, out, smoothing=0.0, also=kept)
  return trainer.run(batch, plan.steps, valid, plan.every, progress), config


def _floats(weight_VD: Any) -> np.ndarray:
  return np.asarray(look_up(weight_VD, np.arange(weight_VD.shape[0])), np.float32)


def _lesson(texts: Texts, rows: np.ndarray, table_VD: np.ndarray, table_RD: Array) -> Lesson:
  ids_BT, spans_B2 = texts.ids_NL[rows], texts.spans_N2[rows]
  steps = np.arange(ids_BT.shape[1])[None]
  # Asked where the model wrote what follows and its features are known: those of the last token are not.
  asked_BT = (steps >= spans_B2[:, :1] - 1) & (steps < spans_B2[:, 1:] - 1)
  vectors = table_VD[np.where(ids_BT == NONE, 0, ids_BT)]
  return Lesson(vectors, texts.features_NLD[rows], asked_BT, table_RD)


def _matrices(params: Any) -> Any:
  """Muon is for all weights that are matrices: a head has no tables."""
  return jax.tree.map(lambda x: optax.contrib.MuonDimensionNumbers(1, 0) if x.ndim == 2 else None, params)
