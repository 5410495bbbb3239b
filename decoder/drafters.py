"""Who guesses ahead for a model: its own text, a head trained for it, or a smaller model.

`head` is the registered head of this model; `head:NAME` a registered one, or the directory of one; `draft:NAME` any
model that `load` takes, with the same vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decoder import checkpoint
from decoder.cache import Cache, LayerSpec, Raw, allocate
from decoder.checkpoint.fingerprint import fingerprint
from decoder.checkpoint.source import read_json
from decoder.models import registry
from decoder.ops.kernels import build
from decoder.ops.linear import linear, look_up
from decoder.ops.quantised import fits, quantise
from decoder.strategies import Both, Companion, Head, feature_head, second_model
from decoder.strategies.speculative import COSTS
from decoder.types import Array, QTensor


class Drafter(NamedTuple):
  """A companion with its parameters. each: what a guess costs, in steps of the model, where both wait for memory.
  features: how many the model has of a token."""

  companion: Companion
  params: Any
  each: float
  features: int


class HeadParams(NamedTuple):
  """ids_R: the tokens that a head drafts. table_RD: makes logits of features, for those."""

  head: Any
  table_RD: Any
  ids_R: Array


def find(lm: Any, spec: str) -> Drafter:
  """The drafter that 'head', 'head:NAME' or 'draft:NAME' stands for, for the model `lm`. ValueError for one that was
  trained for another model or has another vocabulary, CheckpointError for one that cannot be loaded."""
  kind, _, name = spec.partition(":")
  return (_head if kind == "head" else _draft)(lm, name)


def _draft(lm: Any, name: str) -> Drafter:
  loaded = _load(lm, name)
  if registry.has_encoder(loaded.config):
    raise ValueError(f"draft:{name} is an encoder–decoder; a draft model goes on from the same text, as a decoder does")
  network = registry.build(loaded.config, lm.network.dtype)
  _same_vocabulary(lm, f"draft:{name}", loaded, network.vocab_size)
  features, empty = registry.feature_size(lm.network, lm.params), _caches(lm, network.cache_spec)
  return Drafter(second_model(network.model, empty), loaded.params, size(loaded.params) / size(lm.params), features)


def _same_vocabulary(lm: Any, spec: str, draft: Any, draft_size: int) -> None:
  """ValueError where an id does not mean the same to both."""
  if draft_size != lm.network.vocab_size:
    raise ValueError(
      f"{spec} has {draft_size} tokens in its vocabulary, {lm.name} has {lm.network.vocab_size}; a draft model needs "
      "the same tokenizer as the model it drafts for"
    )
  if lm.tokenizer is None or draft.tokenizer is None:
    return  # ids are all there is
  for token in range(min(lm.tokenizer.vocab_size, draft.tokenizer.vocab_size)):
    ours, theirs = lm.tokenizer.token_bytes(token), draft.tokenizer.token_bytes(token)
    if ours != theirs:
      raise ValueError(
        f"token {token} is {theirs!r} to {spec} and {ours!r} to {lm.name}; a draft model needs the same tokenizer as "
        "the model it drafts for"
      )


def _head(lm: Any, name: str) -> Drafter:
  if lm.network.tables is None:
    raise ValueError(
      f"{lm.name} has no head that drafts: that is offered for Llama's family; use 'lookup' or 'draft:…'"
    )
  mine = fingerprint(lm.params, lm.placement.fetch)
  path = checkpoint.resolve(name) if name else _registered_for(lm.name, mine)
  loaded = _load(lm, path)
  config = loaded.config
  if config.get("model_type") not in registry.HEADS:
    raise ValueError(f"head:{name} is a {config.get('model_type')}, no head that drafts; use draft:{name}")
  if config["target"] != mine:
    raise ValueError(
      f"this head was trained for the model with fingerprint {config['target'][:12]}, and {lm.name} has {mine[:12]}; "
      "train one for it with scripts/distill.py"
    )
  ids_R = np.asarray(config["draft_tokens"], np.int32)
  rows_RD = np.asarray(lm.placement.fetch(look_up(lm.network.tables(lm.params)[1], ids_R)))
  in_bits = _kept(lm) is not None and fits(rows_RD.shape)
  table_RD = lm.placement.put("head/weight", quantise(rows_RD, "q8_0", striped=True) if in_bits else rows_RD)
  params = HeadParams(loaded.params, table_RD, lm.placement.put("ids", ids_R))
  return Drafter(feature_head(_as_head(lm, config)), params, size(params) / size(lm.params), config["hidden_size"])


def _as_head(lm: Any, config: dict[str, Any]) -> Head:
  network = lm.network
  run, spec = registry.draft_head(config, network.dtype)

  def forward(params: Both, tokens_BT: Array, features_BTD: Array, positions_BT: Array, cache: Cache) -> Any:
    vectors_BTD = look_up(network.tables(params.model)[0], tokens_BT).astype(network.dtype)
    return run(params.companion.head, vectors_BTD, features_BTD, positions_BT, cache)

  def logits(params: Both, features_BD: Array) -> Array:
    return linear(features_BD, params.companion.table_RD)

  def spread(params: Both, logits_BR: Array) -> Array:
    nothing_BV = jnp.full((logits_BR.shape[0], network.vocab_size), -jnp.inf)
    return nothing_BV.at[:, params.companion.ids_R].set(logits_BR)

  return Head(_caches(lm, spec), forward, logits, config["hidden_size"], network.dtype, spread)


def _caches(lm: Any, spec: Sequence[LayerSpec]) -> Callable[[int, int], Cache]:
  """(rows, capacity) -> an empty cache of a companion, beside the model's own."""
  codec, layout = Raw(lm.network.dtype, bits=True), lm.placement.layout
  return functools.partial(allocate, spec, codec=codec, layout=layout)


def _registered_for(name: str, target: str) -> Path:
  heads = {n: m for n, m in checkpoint.registered().items() if m["source"]["kind"] == "directory"}
  for head in heads:
    path = checkpoint.resolve(head)
    if read_json(path / "config.json").get("target") == target:
      return path
  raise ValueError(
    f"there is no registered head for {name}; train one with scripts/distill.py and give it as head:PATH"
  )


def _load(lm: Any, name: str | Path) -> Any:
  dtype = None if jax.default_backend() == "cpu" else lm.network.dtype
  return checkpoint.load(name, dtype, weights=_kept(lm), placement=lambda config: lm.placement)


def _kept(lm: Any) -> str | None:
  """Drafters are held as their files hold them where kernels read few bits, for what they say is judged anyway."""
  return checkpoint.KEEP if lm.placement.alone and build.ready() else None


def step_costs(params: Any) -> tuple[float, ...]:
  """What a step over 1, 2, 4 and 8 tokens costs, in steps over one. On CPU as measured for SmolLM2-135M (Zen 4), where
  a row of weights in few bits is unpacked for every token; elsewhere arithmetic waits for memory by far."""
  if jax.default_backend() != "cpu":
    return (1.0, 1.0, 1.0, 1.0)
  kinds = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QTensor))
  return (1.0, 1.06, 1.24, 1.97) if any(isinstance(leaf, QTensor) for leaf in kinds) else COSTS


def size(params: Any) -> int:
  """Bytes of all leaves."""
  return sum(leaf.nbytes for leaf in jax.tree.leaves(params))
