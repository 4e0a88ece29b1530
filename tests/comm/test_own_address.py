import pytest

from dlrm_hybrid.comm.own_address import own_address
from dlrm_hybrid.types import ConfigError


def test_an_address_is_taken_as_it_is() -> None:
    assert own_address("10.20.30.40") == "10.20.30.40"


def test_a_network_means_the_address_in_it() -> None:
    assert own_address("127.0.0.0/8") == "127.0.0.1"


@pytest.mark.parametrize(
    ("bind", "fault"),
    [
        ("203.0.113.0/24", "needs one address in 203.0.113.0/24, it has none"),
        ("127.0.0.1/8", "is not an IPv4 network"),
        ("10.0.0.0/99", "is not an IPv4 network"),
    ],
)
def test_what_means_no_address_is_refused(bind: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        own_address(bind)
