"""Mixtral's config and parameters; what its layers compute is checked in `ops/moe_test.py` and against transformers."""

import pytest
from fixtures import CONFIG

from decoder.checkpoint.mapping import flatten
from decoder.models import registry
from decoder.models.mixtral import MixtralConfig

MIXTRAL = {**CONFIG, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
D, F = CONFIG["hidden_size"], CONFIG["intermediate_size"]


def test_experts_lie_one_after_the_other():
  shapes = {path: leaf.shape for path, leaf in flatten(registry.parameter_shapes(MIXTRAL)).items()}
  assert {path: shape for path, shape in shapes.items() if path.startswith("layers_1/mlp/")} == {
    "layers_1/mlp/router/weight": (4, D),
    "layers_1/mlp/experts/gate/weight": (4 * F, D),
    "layers_1/mlp/experts/up/weight": (4 * F, D),
    "layers_1/mlp/experts/down/weight": (4 * D, F),
  }
  dense = {path for path in flatten(registry.parameter_shapes(CONFIG)) if "/mlp/" not in path}
  assert {path for path in shapes if "/mlp/" not in path} == dense


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"num_experts_per_tok": 5}, r"num_experts_per_tok 5 is more than num_local_experts 4"),
    ({"num_experts_per_tok": 0}, r"'num_experts_per_tok' must be a positive integer, got 0"),
    ({"num_local_experts": 0}, r"'num_local_experts' must be a positive integer, got 0"),
    ({"num_local_experts": None}, r"'num_local_experts' must be a positive integer, got None"),
    ({"num_local_experts": 2.5}, r"'num_local_experts' must be a positive integer, got 2\.5"),
    ({"hidden_act": "gelu"}, r"hidden_act of experts is silu, got 'gelu'"),
    ({"num_attention_heads": 6}, r"num_attention_heads 6 is not a multiple of num_key_value_heads 4"),
    ({"intermediate_size": None}, r"'intermediate_size' must be a positive integer"),
  ],
)
def test_impossible_configs_are_refused_by_the_name_of_the_field(changes, message):
  registry.build(MIXTRAL)  # the control
  with pytest.raises(ValueError, match=message):
    registry.build({**MIXTRAL, **changes})


def test_missing_fields_are_what_transformers_takes_them_for():
  needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "model_type")
  config = MixtralConfig.from_dict({**{name: MIXTRAL[name] for name in needed}, "num_attention_heads": 16})
  assert (config.num_local_experts, config.num_experts_per_tok, config.num_key_value_heads) == (8, 2, 8)
  assert (config.rope_parameters["rope_theta"], config.max_position_embeddings, config.rms_norm_eps) == (
    1e6, 131072, 1e-5,
  )  # fmt: skip
  assert config.windows == (None, None)


@pytest.mark.parametrize(("window", "groups"), [(None, {"global"}), (8, {"local"})])
def test_a_window_is_every_layers(window, groups):
  assert {spec.group for spec in registry.build({**MIXTRAL, "sliding_window": window}).cache_spec} == groups
