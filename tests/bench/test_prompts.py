"""``python -m tests.bench prompts`` and ``calls``: what they say, not how fast this machine is."""

import json

from tests.bench.__main__ import main


def test_reading_prompts_at_once_is_measured_beside_reading_their_tokens_one_by_one(capsys):
    assert main(["prompts", "--prompts", "2", "--tokens", "2000", "--repeats", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["seconds"]["at once"] < found["seconds"]["token by token"]
    assert found["ratio"]["low"] > 0 and found["ratio"]["target"] == 10


def test_calls_on_one_loop_are_measured_beside_calls_with_a_loop_each(capsys):
    assert main(["calls", "--threads", "4", "--calls", "2", "--repeats", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"].keys() == {"shared loop", "loop per call"} and found["ratio"]["low"] > 0
