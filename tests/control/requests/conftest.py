import pytest
from tensordict import set_list_to_stack


@pytest.fixture(scope="module", autouse=True)
def lists_are_stacks():
    with set_list_to_stack(True):
        yield
