"""Fitted steps train to the same bits as plain ones, whatever the policy."""

import pytest

from tests.support.plain_training import Race
from ucudnn.memory.policies.catalog import POLICIES


@pytest.fixture(scope="module")
def unet():
    return Race("unet")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_trains_to_the_bits_of_the_plain_loop(unet, policy):
    unet.check(*unet.fitted(policy, debug=True))
