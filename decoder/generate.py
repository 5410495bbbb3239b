"""Text in, text out: the façade over checkpoint, model, strategy and text.

lm = decoder.load("smollm2-135m-instruct")
print(lm.generate("The three laws of thermodynamics are", max_new_tokens=64).text)
"""

import dataclasses
import functools
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from decoder import processes, sharding
from decoder.beam_programs import BeamPrograms
from decoder.checkpoint import DEFAULT, Checkpoint
from decoder.checkpoint import load as load_checkpoint
from decoder.decoding import Decoding, Stream
from decoder.drafters import Drafter, find
from decoder.guided import GuidedPrograms
from decoder.models import registry
from decoder.programs import LOOP, SMALLEST_CAPACITY, Compiler, Programs, bucket
from decoder.reader import Reader, Request, is_batch
from decoder.report import Report, inspection
from decoder.result import Result
from decoder.score import score
from decoder.searching import Searching
from decoder.session import Session
from decoder.settings import Settings, gather_settings
from decoder.speculating import SpeculatingPrograms
from decoder.text.constraints import Constraint, Vocabulary
from decoder.text.dedent import indentation
from decoder.text.infill import Infill, infill_ends, infill_ids
from decoder.types import Model


class LM:
  """A loaded model that writes; built by `load`.

  tokenizer: None if the checkpoint has none. model, params: `Model(forward, head)` and its parameters, for those who
  want only the step. context: longest sequence in tokens.
  """

  kinds: tuple[type[Programs], type[BeamPrograms]] = (Programs, BeamPrograms)  # that write a text, that search one

  def __init__(
    self, checkpoint: Checkpoint, dtype: Any, *, load_s: float = 0.0, announce: Callable[[str], None] | None = None
  ):
    self.name, self.config, self.generation = checkpoint.name, checkpoint.config, checkpoint.generation
    self.tokenizer, self.params = checkpoint.tokenizer, checkpoint.params
    self.network = registry.build(checkpoint.config, dtype)
    self.load_s, self._compiler = load_s, Compiler(checkpoint.placement, announce)
    self._programs: dict[tuple, Programs] = {}
    self._drafters: dict[str, Drafter] = {}
    self._lead = processes.lead()

  @property
  def model(self) -> Model:
    return self.network.model

  @property
  def context(self) -> int:
    return self.network.context

  @property
  def placement(self) -> sharding.Placement:
    """Where its parameters lie and its programs run."""
    return self._compiler.placement

  @functools.cached_property
  def defaults(self) -> Settings:
    """What the checkpoint's generation_config.json asks for: `lm.generate(prompt, lm.defaults)`. Used only where given:
    without settings a text is greedy. ValueError for what cannot be followed."""
    return Settings.from_generation_config(self.generation)

  @functools.cached_property
  def ends(self) -> tuple[int, ...]:
    """Every id that ends a text: by generation config, config and tokenizer (EOS and end of a chat turn)."""
    ids = list(self.tokenizer.eos_ids) if self.tokenizer else []
    for source in (self.generation, self.config):
      named = source.get("eos_token_id")
      ids += named if isinstance(named, list | tuple) else [named]
    return tuple(sorted({int(i) for i in ids if i is not None and 0 <= i < self.network.vocab_size}))

  def encode(self, prompt: Any, add_bos: bool | None = None) -> tuple[int, ...]:
    """Ids of a text, of an Infill, of a conversation (dicts with role and content), or of ids. ValueError if empty or
    unknown."""
    if isinstance(prompt, Infill):
      ids = infill_ids(self._text(), prompt, add_bos)
    elif isinstance(prompt, str):
      ids = self._text().encode(prompt, add_bos=add_bos)
      if not ids:
        raise ValueError("the prompt is empty and this model has no beginning-of-text token; give it some text")
    elif not isinstance(prompt, list | tuple | np.ndarray) or not len(prompt):
      raise ValueError(f"a prompt is a text, an Infill, token ids or messages, at least one, got {prompt!r}")
    elif isinstance(prompt[0], Mapping):
      ids = self._text().encode_chat(prompt)
    else:
      ids = list(prompt)
    for token in ids:
      if not isinstance(token, int | np.integer) or not 0 <= token < self.network.vocab_size:
        raise ValueError(f"prompt token {token!r} is not an id of this model, 0 … {self.network.vocab_size - 1}")
    return tuple(int(token) for token in ids)

  def generate(
    self,
    prompt: Any,
    settings: Settings | Sequence[Settings] | None = None,
    *,
    cancel: threading.Event | None = None,
    **changes: Any,
  ) -> Any:
    """Completes a prompt: a Result; for a list of prompts a list of them; with n > 1 a list of n for each prompt
    (of a search with beams the n best hypotheses, best first; fewer where there are no more).

    prompt: a text, a list of token ids, a conversation (list of dicts with role and content) or an Infill; or a list of
    those, which are decoded together. settings: one for all or one a prompt; keywords change them, see Settings.
    cancel: once another thread sets it, what is not finished ends as it is, 'cancelled'. Raises ValueError for settings
    or prompts that make no sense, before any compute.
    """
    many = is_batch(prompt)
    grouped = self.answer(self.requests(list(prompt) if many else [prompt], settings, **changes), cancel=cancel)
    answers = [group if group[0].settings.n > 1 else group[0] for group in grouped]
    return answers if many else answers[0]

  def complete(self, prefix: str, suffix: str | None = None, settings: Settings | None = None, **changes: Any) -> Any:
    """Writes what comes between two texts, for models that learned to fill in the middle; suffix None: what follows the
    prefix, for any model. Like generate() of an `Infill`, which streams and batches take as well."""
    return self.generate(prefix if suffix is None else Infill(prefix, suffix), settings, **changes)

  def score(self, prompt: Any, continuation: Any, *, logprobs: int = 0) -> Any:
    """How probable the model finds a continuation of a prompt: a Score, of its tokens' raw log-probs and their sum.

    prompt: as for `generate`; continuation: a text or token ids. Either may be a list of them, for a list of Scores;
    one prompt with several continuations is a multiple choice. logprobs: alternatives to report for each token.
    Two texts are encoded as one, and a token that spans the border counts to the continuation. ValueError where there
    is nothing to score or too much; FloatingPointError where the model's logits are not finite.
    """
    return score(self, prompt, continuation, logprobs)

  def stream(self, prompt: Any, settings: Settings | None = None, **changes: Any) -> Stream:
    """Completes one prompt as an iterator of text deltas, a `Stream`; its `.result` holds the Result at the end."""
    if is_batch(prompt):
      raise ValueError("stream() takes one prompt; for several use generate()")
    cancel = threading.Event()
    return Stream(self.start([self.request(prompt, settings, **changes)], cancel=cancel), self.load_s, cancel)

  def session(self, capacity: int | None = None) -> Session:
    """A conversation that keeps its cache from turn to turn."""
    return Session(self, capacity)

  def warm_up(self, batch: int = 1, lengths: Sequence[int] = (16,), capacity: int | None = None) -> float:
    """Compiles ahead for batches of this size and prompts of these lengths in tokens; returns the seconds it took."""
    if batch < 1 or not all(length >= 1 for length in lengths):
      raise ValueError(f"warm_up wants a batch and lengths of at least 1, got {batch} and {lengths!r}")
    start = time.perf_counter()
    for length in lengths:
      self.generate([[0] * length] * batch, max_new_tokens=2, ignore_eos=True, capacity=capacity)
    return time.perf_counter() - start

  def request(self, prompt: Any, settings: Settings | None = None, **changes: Any) -> Request:
    """One prompt with settings, checked against this model. ValueError for n > 1."""
    (group,) = self.requests([prompt], settings, **changes)
    if group[0].settings.searches:
      raise ValueError(
        "a stream shows text as it is written, and a search knows its text only at the end, since hypotheses overtake "
        "each other; use generate(), or num_beams=1 without forced_tokens and continuations"
      )
    if len(group) > 1:
      raise ValueError(f"a stream writes one text, got n or best_of of {len(group)}; use generate()")
    return group[0]

  def requests(
    self, prompts: Sequence[Any], settings: Settings | Sequence[Settings] | None = None, /, **changes: Any
  ) -> list[list[Request]]:
    """For each prompt its n requests, checked as `generate` does."""
    each = settings if isinstance(settings, list | tuple) else [settings] * len(prompts)
    if len(each) != len(prompts):
      raise ValueError(f"got {len(each)} settings for {len(prompts)} prompts; give one for all or one each")
    return [self._group(prompt, gather_settings(chosen, changes)) for prompt, chosen in zip(prompts, each)]

  def answer(self, groups: Sequence[Sequence[Request]], *, cancel: threading.Event | None = None) -> list[list[Result]]:
    """For the requests of each prompt its results, decoded together."""
    if not groups:
      return []
    decoding = self.start([request for group in groups for request in group], cancel=cancel)
    while not decoding.done:
      decoding.advance(LOOP, ahead=True)
    drawn = iter(zip(decoding.results(self.load_s), decoding.reports))
    return [_best([next(drawn) for _ in group]) for group in groups]

  def start(
    self,
    requests: Sequence[Request],
    *,
    capacity: int | None = None,
    cache: Any = None,
    held: int = 0,
    cancel: threading.Event | None = None,
  ) -> Decoding | Searching:
    """Begins to decode requests together; `Decoding.advance` does the work. capacity: of a new cache, in tokens; None
    chooses it. cache, held: a cache to go on from, and the tokens of the prompt to keep of it. cancel: ends all once
    set. A search has a cache of its own."""
    if len({request.settings.structure for request in requests}) > 1:
      raise ValueError(
        "prompts decoded together need the same transforms in the same order, and as many beams; numbers may differ"
      )
    programs = self.programs([request.settings for request in requests])
    readers = [Reader(request, self.tokenizer) for request in requests]
    if requests[0].settings.searches:
      return Searching(programs, readers, compiled_s=lambda: self._compiler.seconds, cancel=cancel, lead=self._lead)
    if capacity is None:
      capacity = max(r.settings.capacity or min(bucket(r.reach, SMALLEST_CAPACITY), self.context) for r in requests)
    return Decoding(
      programs, readers, capacity=capacity, compiled_s=lambda: self._compiler.seconds, cache=cache, held=held,
      cancel=cancel, lead=self._lead,
    )  # fmt: skip

  def programs(self, each: Sequence[Settings]) -> Programs:
    """The compiled programs for rows of these settings, whose chains have one order; made once. If one row needs the
    full chain or guidance, all have it."""
    full, guided = any(s.needs_full for s in each), any(s.guidance_scale != 1 for s in each)
    inspect = inspection(each, full)
    key = (each[0].structure, full, guided, inspect)
    if key not in self._programs:
      vocab = self.tokenizer.vocab_size if self.tokenizer else None
      plain, beams = self.kinds
      guesses = functools.partial(SpeculatingPrograms, drafter=self.drafter(each[0].speculate))
      asked = ((each[0].searches, beams), (guided, GuidedPrograms), (each[0].speculate != "off", guesses))
      kind = next((kind for wanted, kind in asked if wanted), plain)
      self._programs[key] = kind(self.network, self.params, each[0], full, inspect, vocab, self._compiler)
    return self._programs[key]

  def drafter(self, spec: str) -> Drafter | None:
    """Who guesses ahead, as `Settings.speculate` says: loaded once; None where nobody or the text itself does."""
    if spec not in ("off", "lookup") and spec not in self._drafters:
      self._drafters[spec] = find(self, spec)
    return self._drafters.get(spec)

  def _text(self) -> Any:
    if self.tokenizer is None:
      raise ValueError(f"{self.name} came without a tokenizer; pass token ids, or add tokenizer.json to the checkpoint")
    return self.tokenizer

  def _group(self, prompt: Any, settings: Settings) -> list[Request]:
    if settings.stop or settings.stop_at_dedent:
      self._text()  # both are found in text
    self.drafter(settings.speculate)
    if settings.has_texts:
      settings = settings.encoded(self._spellings)
    for token in settings.stop_token_ids:
      if token >= self.network.vocab_size:
        raise ValueError(f"stop_token_ids: {token} is not an id of this model, 0 … {self.network.vocab_size - 1}")
    if settings.capacity is not None and settings.capacity > self.context:
      raise ValueError(f"capacity {settings.capacity} is beyond the context of {self.name}, {self.context} tokens")
    settings.check_vocabulary(self.tokenizer.vocab_size if self.tokenizer else self.network.vocab_size)
    room = settings.capacity or self.context
    if isinstance(prompt, Infill) and settings.truncate is not None:
      raise ValueError("truncate would cut the marks of an Infill prompt; shorten its prefix or suffix instead")
    settings, ids, source, cut = self._read(prompt, settings, room)
    seed = secrets.randbits(32) if settings.seed is None else settings.seed
    seed, agreed = self._lead.agree((seed, ids))  # a chat template may say what day it is
    ids = tuple(agreed)
    negative = self._negative(ids, settings, room)
    room -= max(0, len(negative) - len(ids))
    limit = room if settings.max_new_tokens is None else len(ids) + settings.max_new_tokens
    full = "context" if limit > room or settings.max_new_tokens is None else cut
    ends = {*(() if settings.ignore_eos else self.ends), *settings.stop_token_ids}
    if isinstance(prompt, Infill):
      ends.update(infill_ends(self._text()))
    ends = tuple(sorted(ends))
    constraint = self._constraint(settings, ends)
    indent = _indent(prompt) if settings.stop_at_dedent else None
    limit = min(limit, room)
    settings.check_forced(ends, limit - len(ids))
    request = Request(ids, settings, seed, 0, limit, ends, cut, full, constraint, negative, indent, source)
    return [dataclasses.replace(request, sample=sample) for sample in range(settings.samples)]

  def _read(self, prompt: Any, settings: Settings, room: int) -> tuple[Settings, tuple, tuple, str | None]:
    """The settings that a prompt is written on with, the ids before the first one to write, those an encoder reads, and
    what was cut off."""
    if settings.src is not None or settings.tgt is not None:
      raise ValueError(f"src and tgt name languages to models that read a text to translate it; {self.name} does not")
    ids, cut = self._fit(self.encode(prompt, settings.add_bos), settings, room)
    return settings, ids, (), cut

  def _spellings(self, name: str, text: str) -> list[tuple[int, ...]]:
    try:
      return self._text().spellings(text)
    except ValueError as error:
      raise ValueError(f"{name}: {error}") from error

  def _negative(self, ids: tuple[int, ...], settings: Settings, room: int) -> tuple[int, ...]:
    """The ids of the negative prompt; none if it is not asked for."""
    if settings.guidance_scale == 1:
      return ()
    negative = ids[-1:] if settings.negative_prompt is None else self.encode(settings.negative_prompt, settings.add_bos)
    if len(negative) >= room:
      raise ValueError(f"the negative prompt has {len(negative)} tokens, there is room for {room}; shorten it")
    return negative

  def _constraint(self, settings: Settings, ends: Sequence[int]) -> Constraint | None:
    spec = settings.constraint()
    return None if spec is None else self._vocabulary.constraint(spec, ends)

  @functools.cached_property
  def _vocabulary(self) -> Vocabulary:
    return Vocabulary(self._text(), self.network.vocab_size, self.ends)

  def _fit(self, ids: tuple[int, ...], settings: Settings, room: int) -> tuple[tuple[int, ...], str | None]:
    """The prompt, shortened where asked, so that up to a quarter of the room is left for the answer."""
    if len(ids) < room:
      return ids, None
    if settings.truncate is None:
      name = "context" if room == self.context else "capacity"
      raise ValueError(
        f"the prompt has {len(ids)} tokens, the {name} holds {room} with at least one new one; "
        "shorten it, or set truncate to 'left' or 'middle'"
      )
    answer = room if settings.max_new_tokens is None else settings.max_new_tokens
    size = room - max(1, min(answer, room // 4))
    if size < 2:
      raise ValueError(f"capacity {room} leaves no room for a shortened prompt; raise it")
    begins = self.tokenizer is not None and self.tokenizer.bos_id == ids[0]
    head = size // 2 if settings.truncate == "middle" else int(begins)
    return (*ids[:head], *ids[len(ids) - (size - head) :]), "prompt"


def load(
  name: str | Path = DEFAULT,
  *,
  dtype: Any = None,
  weights: str | None = None,
  mesh: str | Mapping[str, int] | None = None,
  cache_dir: str | Path | None = None,
  announce: Callable[[str], None] | None = None,
) -> LM:
  """A model by registered name, path (GGUF file, Hugging Face or Orbax directory) or `hf:org/name`.

  dtype: of weights and compute; None is float32 on CPU, bfloat16 elsewhere. weights: None for floats, 'keep' for the
  quantised blocks of a file as they are, or 'int8', 'q8_0', 'q4_0', 'q4_1' to round to (see `checkpoint.load`).
  mesh: None for one device, or how the model is divided among all of them: 'tensor=4,data=2', see `sharding.parse`.
  cache_dir: where fetched models and compiled programs are kept; default the user's cache directory. announce: told
  in words before each compilation. Unless JAX's compilation cache is set already, it is set to a folder there, so that
  a second process compiles nothing. Raises CheckpointError (a ValueError) that says what was wrong and what to do.
  """
  start = time.perf_counter()
  if not isinstance(name, str | Path) or not str(name).strip():
    raise ValueError(f"a model is named by a text or a path, got {name!r}")
  dtype = _float_type(dtype)
  _keep_compilations(cache_dir)
  placement = _placement(mesh)
  checkpoint = load_checkpoint(name, dtype, weights=weights, cache_dir=cache_dir, placement=placement)
  processes.lead().same(lambda: {"the checkpoint": processes.digest_of(checkpoint.path)})
  lm = kind_of(checkpoint.config)(checkpoint, dtype, announce=announce)
  lm.load_s = time.perf_counter() - start
  return lm


def _placement(mesh: str | Mapping[str, int] | None) -> Callable[[Mapping[str, Any]], sharding.Placement]:
  """config -> where a model of it lies. ValueError for what is no mesh of the devices that there are."""
  if mesh is None:
    return lambda config: sharding.OneDevice()
  sizes = sharding.parse(mesh, jax.device_count()) if isinstance(mesh, str) else dict(mesh)

  def over(config: Mapping[str, Any]) -> sharding.Placement:
    spec = registry.build(config).cache_spec
    heads = sharding.query_heads(registry.parameter_shapes(config), spec)
    return sharding.Sharding(sharding.mesh_for(sizes, spec, heads))

  return over


def kind_of(config: Mapping[str, Any]) -> type[LM]:
  """What a model of this config.json is behind the façade."""
  from decoder.translator import Translator  # which is an LM

  return Translator if registry.has_encoder(config) else LM


def _keep_compilations(cache_dir: str | Path | None) -> None:
  from decoder.checkpoint.hub import cache_directory

  if jax.config.jax_compilation_cache_dir is not None:
    return
  directory = cache_directory(cache_dir) / "compiled"
  try:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
      pass
  except OSError:
    return  # nothing can be kept there, and JAX would say so for every program
  jax.config.update("jax_compilation_cache_dir", str(directory))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _float_type(dtype: Any) -> Any:
  """The type of weights and compute; None is float32 on CPU, bfloat16 elsewhere."""
  known = ("float32", "bfloat16", "float16")
  if dtype is None:
    return jax.numpy.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
  try:
    found = jax.numpy.dtype(dtype)
  except TypeError:
    found = None
  if found is None or found.name not in known:
    raise ValueError(f"dtype must be one of {', '.join(known)}, got {dtype!r}")
  return found


def _indent(prompt: Any) -> int | None:
  """Columns before the last line of a prompt that is text."""
  text = prompt.prefix if isinstance(prompt, Infill) else prompt
  if not isinstance(text, str):
    raise ValueError(f"stop_at_dedent measures the last line of a text, got a prompt of {type(prompt).__name__}")
  return indentation(text)


def _best(drawn: list[tuple[Result, Report]]) -> list[Result]:
  """A prompt's n results: all that there are, or the best of more."""
  drawn = [(result, report) for result, report in drawn if result is not None]
  settings = drawn[0][0].settings
  if settings.best_of is not None:
    drawn = sorted(drawn, key=lambda pair: -pair[1].mean_logprob())[: settings.n]
  return [result for result, _ in drawn]
