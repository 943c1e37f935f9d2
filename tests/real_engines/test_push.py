"""`torchrl-ext push` to real servers; `test_native` has those without our plugin."""

import pytest

from tests.models import greedy, tiny_checkpoint, tiny_model
from tests.real_engines.served import command

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_a_checkpoint_is_pushed(transport, served, checkpoint, tmp_path, capsys):
    other = tiny_checkpoint(tmp_path / "other", seed=3)
    command(capsys, "push", checkpoint, "--engines", served.url)
    assert served.tokens() == greedy(tiny_model(0))
    told = command(capsys, "push", other, "--engines", served.url, "--transport", transport)
    assert told["pushed"] and told["report"]["verified"]
    assert served.tokens() == greedy(tiny_model(3))
    assert served.version() == str(told["report"]["version"])
