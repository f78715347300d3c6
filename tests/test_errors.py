"""Exceptions travel between processes with all that they say."""

import inspect
import pickle

import pytest

from ucudnn import errors

NAMES = [name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)]


@pytest.mark.parametrize("name", NAMES)
def test_an_exception_survives_pickling(name):
    kind = getattr(errors, name)
    parameters = inspect.signature(kind.__init__).parameters.values()
    positional = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "self"]
    named = {each.name: 7 for each in parameters if each.kind is each.KEYWORD_ONLY}
    error = kind(*(["what is wrong"] * max(1, len(positional))), **named)
    error.add_note("where")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    for attribute in named:
        assert getattr(copy, attribute) == 7
