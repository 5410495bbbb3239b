"""The planner against arithmetic by hand, and laws that any plan obeys."""

import dataclasses
import json

import pytest

from decoder import sharding
from decoder.measure import advice, known, planning, shapes
from decoder.measure.plan import Plan, Planner, factorisations
from decoder.measure.topologies import Device, Topology, find

CONFIG = {
  "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
  "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
TABLE, ATTENTION, MLP, NORMS = 512 * 64, 64 * 64 * 2 + 32 * 64 * 2, 3 * 128 * 64, 2 * 64  # elements
LAYER = ATTENTION + MLP + NORMS
WHOLE = 2 * TABLE + 2 * LAYER + 64


def topology(devices: int, memory: float = 1e9, bandwidth: float = 1e9) -> Topology:
  """Devices without tiles, so that bytes can be counted by hand."""
  device = Device("toy", int(memory), bandwidth, 1e12, 1e9, 1e-6, "made up")
  return Topology("toy", device, devices, devices, None, True)


def plan(devices: int = 1, batch: int = 4, context: int = 512, weights: str = "bfloat16", **mesh: int) -> Plan:
  planner = Planner(CONFIG, topology(devices))
  return planner.plan(planner.case(weights, "bfloat16", batch, context, mesh))


def test_weights_and_cache_of_one_device():
  need = plan().need
  assert need.weights == 2 * WHOLE
  assert need.cache == 2 * 2 * (4 * 2 * 512 * 16) * 2  # layers, keys and values, [B, K, S, H], bytes


def test_slots_are_whole_blocks():
  assert plan(context=513).need.cache == plan(context=768).need.cache > plan(context=512).need.cache


def test_int8_has_a_byte_a_weight_and_a_scale_an_output():
  outputs = 2 * 512 + 2 * (64 + 32 + 32 + 64 + 128 + 128 + 64)
  norms = 2 * NORMS + 64
  assert plan(weights="int8").need.weights == WHOLE - norms + 4 * outputs + 2 * norms


def test_four_bits_have_scales_by_groups_and_tables_in_eight():
  grouped = WHOLE - 2 * NORMS - 64
  four = (grouped - 2 * TABLE) * (1 / 2 + 2 / 32)
  assert plan(weights="q4_0").need.weights == four + 2 * TABLE * (1 + 2 / 32) + 2 * (2 * NORMS + 64)


def test_tensor_divides_all_but_norms():
  need, norms = plan(2, tensor=2).need, 2 * (2 * NORMS + 64)
  assert need.weights == (2 * WHOLE - norms) / 2 + norms
  assert need.cache == plan().need.cache / 2


def test_more_tensor_than_key_value_heads_holds_those_twice():
  planner = Planner(CONFIG, topology(4))
  case = planner.case("bfloat16", "bfloat16", 4, 512, {"tensor": 4})
  assert planner.need(case).cache == plan(2, tensor=2).need.cache
  assert any("held by 2 devices" in note for note in planner.notes(case))
  assert planner.plan(case).mesh == "tensor=4"


def test_data_divides_rows_and_holds_weights_in_each():
  """Also the negative control of `test_tensor_divides_all_but_norms`."""
  need = plan(2, data=2).need
  assert need.weights == plan().need.weights
  assert need.cache == plan().need.cache / 2


def test_sequence_divides_slots():
  need = plan(2, sequence=2).need
  assert (need.weights, need.cache) == (plan().need.weights, plan().need.cache / 2)


def test_a_step_reads_weights_and_cache_but_the_table_only_by_rows():
  speed = plan().speed
  assert speed.memory == pytest.approx((2 * (WHOLE - TABLE) + plan().need.cache) / 1e9)
  products = 2 * 4 * (WHOLE - TABLE - 2 * NORMS - 64)
  scores = 2 * 2 * 2 * 4 * 4 * 512 * 16  # layers, scores and values, multiply and add, [B, N, S, H]
  assert speed.arithmetic == pytest.approx((products + scores) / 1e12)
  assert speed.links == 0
  assert plan().tokens_per_s == pytest.approx(4 / speed.step)


def test_sums_over_links_are_two_a_layer():
  size = 4 * 64 * 2  # rows, width, bytes
  each = 2 * (1 / 2) * size / 1e9 + 1e-6
  assert plan(2, tensor=2).speed.links == pytest.approx(4 * each)
  assert plan(2, data=2).speed.links == 0


def test_a_window_is_all_that_a_layer_reads_but_not_all_it_holds():
  windowed = {**CONFIG, "model_type": "mistral", "sliding_window": 128}
  planner = Planner(windowed, topology(1))
  case = planner.case("bfloat16", "bfloat16", 4, 512, {})
  assert planner.need(case) == plan().need
  assert planner.speed(case).memory == pytest.approx((2 * (WHOLE - TABLE) + plan().need.cache / 4) / 1e9)


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_more_devices_never_need_more_of_each(weights):
  best = [Planner(CONFIG, topology(devices)).best(weights, "bfloat16", 8, 1024) for devices in (1, 2, 4)]
  least = [
    min(p.need.total for p in Planner(CONFIG, topology(n)).candidates(weights, "bfloat16", 8, 1024)) for n in (1, 2, 4)
  ]
  assert least == sorted(least, reverse=True)
  assert all(one.fits for one in best)
  assert best[2].speed.memory < best[1].speed.memory < best[0].speed.memory


@pytest.mark.parametrize("change", [{"batch": 8}, {"context": 1024}])
def test_more_rows_and_tokens_never_need_less(change):
  assert plan(**change).need.total > plan().need.total


def test_meshes_are_all_factorisations_that_the_model_allows():
  assert len(list(factorisations(8, ("data", "expert", "sequence", "tensor")))) == 20
  meshes = [p.mesh for p in Planner(CONFIG, topology(4)).candidates("bfloat16", "bfloat16", 2, 512)]
  assert sorted(meshes) == ["data=2,sequence=2", "data=2,tensor=2", "sequence=2,tensor=2", "tensor=4"]


def test_those_that_fit_come_first_then_the_fastest():
  tight = Planner(CONFIG, topology(2, memory=plan(2, tensor=2).need.total))
  plans = tight.candidates("bfloat16", "bfloat16", 4, 512)
  assert [p.fits for p in plans] == [True, False, False]
  assert plans[0].mesh == "tensor=2"


@pytest.mark.parametrize(
  ("mesh", "says"),
  [
    ({"tensor": 8}, "does not divide 4 heads"),
    ({"data": 8}, "does not divide a batch of 4"),
    ({"expert": 8}, "experts"),
    ({"tensor": 4}, "needs 4 devices, got 8"),
  ],
)
def test_what_the_model_does_not_allow_is_refused(mesh, says):
  with pytest.raises(ValueError, match=says):
    Planner(CONFIG, topology(8)).case("bfloat16", "bfloat16", 4, 512, mesh)


def test_advice_is_what_fits():
  """Each suggestion is tried; without it nothing fits."""
  need = plan().need
  planner = Planner(CONFIG, topology(1, memory=need.total - 100_000))
  wish = advice.Wish("bfloat16", "bfloat16", 4, 512)
  assert not planner.best(*wish).fits
  told = advice.advise(planner, wish)
  assert told[:2] == ["use a batch of 2", "use a context of 256"]
  assert planner.best(*wish._replace(batch=2)).fits
  assert planner.best(*wish._replace(context=256)).fits
  weights = next(one.split()[-1] for one in told if one.startswith("hold weights"))
  assert planner.best(*wish._replace(weights=weights)).fits


def test_room_is_the_most_that_fits():
  planner = Planner(CONFIG, topology(1, memory=plan(batch=8).need.total))
  wish = advice.Wish("bfloat16", "bfloat16", 4, 512)
  told = advice.room(planner, wish)
  assert told == ["up to 8 rows of 512 tokens fit (batches doubled)",
                  "up to 1,024 tokens, all that the model was made for, fit in 4 rows"]  # fmt: skip


def test_a_verdict_says_what_is_too_large():
  small = dataclasses.replace(Planner(CONFIG, topology(1)), topology=topology(1, memory=1000))
  plans = small.candidates("bfloat16", "bfloat16", 4, 512)
  text = planning.report("tiny", small, plans, advice.advise(small, advice.Wish("bfloat16", "bfloat16", 4, 512)))
  assert "does not fit" in text
  assert "take" in text
  assert "choose a smaller model or larger devices" in text
  assert json.loads(json.dumps(planning.data("tiny", small, plans, [])))["fits"] is False


def test_published_shapes_have_their_published_sizes():
  """Parameters: 8.03 and 7.25 billion (Hugging Face counts them on their pages)."""
  for name, billions in (("llama-3-8b", 8.03), ("mistral-7b", 7.25)):
    planner = Planner(known.config(name), topology(1, memory=1e12))
    assert planner.plan(planner.case("bfloat16", "bfloat16", 1, 256, {})).need.weights / 2e9 == pytest.approx(
      billions, abs=0.01
    )


def test_a_registered_name_and_a_path_are_known_models(tmp_path):
  assert known.config("smollm2-135m-instruct")["hidden_size"] == 576
  (tmp_path / "config.json").write_text(json.dumps(CONFIG))
  assert known.config(str(tmp_path / "config.json")) == CONFIG
  with pytest.raises(ValueError, match="did you mean llama-3-8b"):
    known.config("llama3-8b")


def test_an_encoder_decoder_is_planned_too():
  planner = Planner(known.config("bible-es-en"), find("v5e-1"))
  plans = planner.candidates("bfloat16", "bfloat16", 2, 128)
  assert plans[0].need.cache > 0
  assert plans[0].fits


def test_formats_have_short_names():
  assert shapes.named("bf16", shapes.FORMATS, "weights") == "bfloat16"
  with pytest.raises(ValueError, match="unknown cache 'int3'; known are bfloat16"):
    shapes.named("int3", list(shapes.CACHES), "cache")


def test_an_abstract_mesh_has_the_rules_of_a_real_one():
  import jax

  params = shapes.parameters(CONFIG, "bfloat16")
  real = sharding.Sharding(sharding.mesh_of(dict.fromkeys(sharding.AXES, 1), jax.devices()[:1]))
  abstract = shapes.abstract({})
  assert real.specs(params, sharding.PARAMETERS) == abstract.specs(params, sharding.PARAMETERS)
