"""Ledgers of trials for tests that begin where steps are steady."""

from ucudnn.torch.steps.trial_ledger import TrialLedger


def begun(share, clock):
    """Return a ledger of which the time counts."""
    ledger = TrialLedger(share, clock)
    ledger.begin()
    return ledger
