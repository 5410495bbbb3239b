"""What a killed run leaves behind, and what the next one makes of it."""

import json

import pytest

from decoder.journal import Journal

WHO = {"model": "m", "settings": {"num_beams": 4, "stop": ["a"]}}


def begun(directory, *records):
  """A file whose run was killed after these records."""
  target = directory / "out.txt"
  with Journal(target, WHO) as journal:
    for record in records:
      journal.add(record)
  return target


def test_records_come_back_in_order(tmp_path):
  target = begun(tmp_path, [1, "é"], {"a": None})
  with Journal(target, WHO) as journal:
    assert (journal.records, journal.complete) == ([[1, "é"], {"a": None}], False)
    journal.add(3)
  with Journal(target, WHO) as journal:
    assert journal.records == [[1, "é"], {"a": None}, 3]


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_half_written_record_is_dropped_and_written_again(tmp_path, cut):
  target = begun(tmp_path, "first", "second")
  progress = tmp_path / "out.txt.progress"
  progress.write_bytes(progress.read_bytes()[:-cut])
  with Journal(target, WHO) as journal:
    assert journal.records == ["first"]
    journal.add("second")
  with Journal(target, WHO) as journal:
    assert journal.records == ["first", "second"]


def test_a_run_killed_before_its_first_line_begins_anew(tmp_path):
  (tmp_path / "out.txt.progress").write_bytes(b'{"model": ')
  with Journal(tmp_path / "out.txt", WHO) as journal:
    assert journal.records == []
    journal.add(1)
  with Journal(tmp_path / "out.txt", WHO) as journal:
    assert journal.records == [1]


def test_a_whole_file_keeps_only_what_it_is_of(tmp_path):
  target = begun(tmp_path, 1)
  with Journal(target, WHO) as journal:
    target.write_text("done\n")
    journal.finish()
  (line,) = (tmp_path / "out.txt.progress").read_text().splitlines()
  assert json.loads(line) == {**WHO, "complete": True}
  with Journal(target, WHO) as journal:
    assert (journal.complete, journal.records) == (True, [])
  assert sorted(path.name for path in tmp_path.iterdir()) == ["out.txt", "out.txt.progress"]


@pytest.mark.parametrize(
  ("identity", "says"),
  [
    ({**WHO, "model": "n"}, "begun with model 'm', now 'n'; use the same again"),
    ({"model": "m", "settings": {"num_beams": 2, "stop": ["a"]}}, "begun with num_beams 4, now 2"),
    ({"model": "m", "settings": {"num_beams": 4, "stop": []}}, r"stop \['a'\], now \[\]"),
    ({"settings": WHO["settings"]}, "model 'm', now None"),
  ],
)
def test_a_file_of_something_else_is_refused_whole_or_not(tmp_path, identity, says):
  target = begun(tmp_path, 1)
  with pytest.raises(ValueError, match=says):
    Journal(target, identity)
  with Journal(target, WHO) as journal:
    target.write_text("done\n")
    journal.finish()
  with pytest.raises(ValueError, match=says):
    Journal(target, identity)


def test_files_of_nobody_damaged_ones_and_missing_places_are_refused(tmp_path):
  target = tmp_path / "mine.txt"
  target.write_text("precious\n")
  with pytest.raises(ValueError, match=r"mine\.txt exists, and no run is known"):
    Journal(target, WHO)
  assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
  (tmp_path / "mine.txt.progress").write_text("")
  with pytest.raises(ValueError, match=r"mine\.txt exists, and no run is known"):
    Journal(target, WHO)
  (tmp_path / "empty.txt").write_text("")
  Journal(tmp_path / "empty.txt", WHO).__exit__()
  (tmp_path / "odd.txt.progress").write_text("[1]\nx\n")
  with pytest.raises(ValueError, match=r"odd\.txt\.progress is damaged .* remove it and"):
    Journal(tmp_path / "odd.txt", WHO)
  with pytest.raises(ValueError, match="no such directory; make it first"):
    Journal(tmp_path / "absent" / "out.txt", WHO)


def test_two_runs_do_not_write_one_file(tmp_path):
  with Journal(tmp_path / "out.txt", WHO), pytest.raises(ValueError, match="another process is writing"):
    Journal(tmp_path / "out.txt", WHO)
