"""Notes of the calls of functions that do what they did before."""


def noted(monkeypatch, owner, *names, of=lambda *call, **how: call):
    """Return a list that gets an item for each call of some functions of an object or class, or methods.

    Args:
        monkeypatch: ends that after the test.
        owner: the object or class.
        names: names of the functions.
        of: returns the item, given the arguments of a call; the arguments themselves by default.
    """
    found = []
    for name in names:
        run = getattr(owner, name)

        def called(*call, run=run, **how):
            found.append(of(*call, **how))
            return run(*call, **how)

        monkeypatch.setattr(owner, name, called)
    return found
