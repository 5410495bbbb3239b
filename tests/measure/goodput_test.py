"""Laws of the simulation of fleets: nothing is lost, an idle fleet is as fast as measured, more never worse."""

import json

import pytest

from decoder.measure import goodput
from decoder.measure.goodput import Asked, Fleet, Promise, Times, simulate

TIMES = Times([(16, 0.02), (256, 0.2), (1024, 1.0)], [(1, 0.02), (8, 0.03), (16, 0.05)], [(16, 0.001), (1024, 0.02)])
FLEETS = [Fleet(together=2, chunk=64, slots=4), Fleet(together=2, slots=4), Fleet(prefill=1, decode=1, slots=4)]
PROMISE = Promise(1.0, 0.05)
named = pytest.mark.parametrize("fleet", FLEETS, ids=lambda fleet: fleet.name)


def ask(rate, seed=0, count=200):
  return goodput.load(rate, count, seed, (200, 0.8), (30, 0.6), (1024, 200))


def test_the_load_is_of_its_rate_and_its_seed():
  asked = ask(4.0)
  assert asked == ask(4.0)
  assert asked != ask(4.0, seed=1)
  assert asked[-1].arrival == pytest.approx(200 / 4.0)
  assert [one[1:] for one in asked] == [one[1:] for one in ask(0.5)], "the same requests at any rate"
  assert all(1 <= one.prompt <= 1024 and 1 <= one.new <= 200 for one in asked)


@named
@pytest.mark.parametrize("rate", [0.1, 2.0, 50.0])
def test_every_request_is_served_and_none_faster_than_its_work(fleet, rate):
  asked = ask(rate)
  told = simulate(asked, TIMES, fleet)
  assert len(told) == len(asked)
  reading = goodput._linear(TIMES.prefill)
  for one, two in zip(asked, told):
    assert two.ttft >= reading(one.prompt) - 1e-9
    assert two.tpot >= 0.02 - 1e-9 if one.new > 1 else two.tpot == 0
  assert told == simulate(asked, TIMES, fleet), "nothing in it is random"


@named
def test_an_idle_fleet_is_as_fast_as_measured(fleet):
  (told,) = simulate([Asked(5.0, 256, 11)], TIMES, fleet)
  assert told.ttft == pytest.approx(0.2)
  moved = goodput._linear(TIMES.move)(256) if fleet.prefill else 0.0
  assert told.tpot == pytest.approx(0.02 + moved / 10)
  (told,) = simulate([Asked(0.0, 1024, 1)], TIMES, fleet)
  assert told == (pytest.approx(1.0), 0.0)


def test_what_a_turn_takes_is_worked_out_by_hand():
  """A row is delayed by the chunks of a prompt that comes while it is decoded, and apart by none."""
  asked = [Asked(0.0, 16, 101), Asked(0.5, 256, 1)]
  mixed, _ = simulate(asked, TIMES, Fleet(together=1, chunk=64))
  apart, _ = simulate(asked, TIMES, Fleet(prefill=1, decode=1))
  assert mixed.tpot == pytest.approx(0.02 + 0.2 / 100)
  assert apart.tpot == pytest.approx(0.02 + 0.001 / 100)


@named
@pytest.mark.parametrize("rate", [0.5, 3.0, 12.0])
def test_goodput_is_at_most_the_rate(fleet, rate):
  asked = ask(rate)
  told = simulate(asked, TIMES, fleet)
  good = goodput.goodput(asked, told, PROMISE, fleet.devices)
  assert 0 <= good * fleet.devices <= rate + 1e-9
  assert good * fleet.devices == pytest.approx(rate * goodput.attainment(told, PROMISE))
  assert goodput.attainment(told, Promise(1e9, 1e9)) == 1
  assert goodput.attainment(told, Promise(0, 0)) == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rate", [2.0, 6.0, 20.0])
def test_more_devices_are_never_worse(seed, rate):
  asked = ask(rate, seed)

  def kept(**devices):
    return goodput.attainment(simulate(asked, TIMES, Fleet(slots=4, chunk=128, **devices)), PROMISE)

  grown = [[kept(together=n) for n in (1, 2, 4, 8)], [kept(prefill=n, decode=4) for n in (1, 2, 4)]]
  grown.append([kept(prefill=4, decode=n) for n in (1, 2, 4)])
  for shares in grown:
    assert shares == sorted(shares)
  few, many = (simulate(asked, TIMES, Fleet(prefill=n, decode=1)) for n in (1, 2))
  assert all(b.ttft <= a.ttft + 1e-9 for a, b in zip(few, many))


def test_a_longer_promise_and_a_lower_rate_are_never_worse():
  fleet = FLEETS[2]
  best = [goodput.highest_rate(ask, TIMES, fleet, PROMISE.times(scale)) for scale in (0.5, 1, 2, 4)]
  assert best == sorted(best)
  assert best[-1] > 0
  most = best[1] * fleet.devices
  shares = [goodput.attainment(simulate(ask(rate), TIMES, fleet), PROMISE) for rate in (most / 2, most, 1.3 * most)]
  assert shares[0] >= shares[1] >= 0.9 > shares[2]
  assert goodput.highest_rate(ask, TIMES, fleet, Promise(0.001, 0.05)) == 0


def test_noise_in_the_times_makes_nothing_free():
  """Found in CI: eight rows took less time than four, so sixteen took none, and no rate was too high."""
  noisy = Times([(16, 0.004), (40, 0.002)], [(1, 0.003), (4, 0.001)], [(16, 0.002), (40, 0.001)])
  costs = goodput._Costs(*map(goodput._linear, noisy))
  assert (costs.prefill(1000), costs.step(16), costs.move(28)) == (0.004, 0.003, 0.002)
  for fleet in FLEETS:
    assert 0 < goodput.highest_rate(ask, noisy, fleet, goodput.promise(noisy, 256, 16)) < 1e4


@named
def test_a_promise_that_any_rate_keeps_is_refused(fleet):
  with pytest.raises(ValueError, match="even 200 requests at once"):
    goodput.highest_rate(ask, TIMES, fleet, Promise(1e6, 1e6))


def test_a_simulation_that_loses_requests_is_found(monkeypatch):
  """Negative control: a device that forgets whom it has no slot for."""
  turn = goodput._Device.turn

  def forgetful(self, now):
    while len(self.ready) > 2:
      self.ready.pop()
    return turn(self, now)

  monkeypatch.setattr(goodput._Device, "turn", forgetful)
  with pytest.raises(AssertionError):
    test_every_request_is_served_and_none_faster_than_its_work(FLEETS[2], 50.0)


def test_a_sweep_has_every_fleet_at_the_same_rates(tmp_path):
  fleets = goodput.fleets(3, 4, 64)
  assert [fleet.name for fleet in fleets] == [
    "3 colocated, chunks of 64",
    "1 prefill : 2 decode",
    "2 prefill : 1 decode",
  ]
  promise = goodput.promise(TIMES, 200, 4)
  assert promise == (pytest.approx(5 * goodput._linear(TIMES.prefill)(200)), pytest.approx(1.5 * (0.02 + 0.01 / 7)))
  sweep = goodput.sweep(TIMES, fleets, lambda rate: ask(rate, count=60), promise, scales=(0.5, 1.0), points=4)
  for line in sweep.lines:
    assert line.rates == sweep.lines[0].rates
    assert line.best[1] == line.highest
    assert all(good <= rate + 1e-9 for rate, good in zip(line.rates, line.good))
  from matplotlib.image import imread

  from decoder.measure import goodput_plots

  machine = {"processor": "P", "cores": 1, "device": "cpu", "devices": 1}
  facts = {"machine": machine, "versions": {"jax": "1"}, "date": "2026-01-01 00:00", "commit": None, "model": "tiny"}
  goodput_plots.draw(sweep, facts, tmp_path / "new.png")
  pixels = imread(tmp_path / "new.png")
  assert ((pixels[..., :3].max(axis=-1) - pixels[..., :3].min(axis=-1)) > 0.3).sum() > 200


def test_files_and_fleets_that_make_no_sense_are_refused(tmp_path):
  file = tmp_path / "times.json"
  file.write_text(json.dumps(TIMES._asdict()))
  assert goodput.read_times(file) == TIMES
  for wrong in ("{", "[]", '{"prefill": 1}'):
    file.write_text(wrong)
    with pytest.raises(ValueError, match="serving times"):
      goodput.read_times(file)
  file.write_text(json.dumps({**TIMES._asdict(), "step": [[4, 1.0], [2, 1.0]]}))
  with pytest.raises(ValueError, match="ascending"):
    goodput.read_times(file)
  file.write_text(json.dumps({**TIMES._asdict(), "step": [[1, 0.0], [2, 1.0]]}))
  with pytest.raises(ValueError, match="above 0"):
    goodput.read_times(file)
  for fleet in (
    Fleet(prefill=1),
    Fleet(decode=2),
    Fleet(),
    Fleet(together=1, prefill=1, decode=1),
    Fleet(together=1, slots=0),
  ):
    with pytest.raises(ValueError, match=r"fleet|slot"):
      simulate([Asked(0, 1, 1)], TIMES, fleet)
  with pytest.raises(ValueError, match="two devices"):
    goodput.fleets(1, 4, 64)
